"""Which failures of a command are the user's to mend, and which are defects of irpe.

What a user can mend is an `irpe.UserError`, or the machine's: the operating system refused
something, memory ran out, a package is missing, another process of the run was lost. Everything
else, a `KeyError` or a `ValueError` from within another library, is a defect: no check of ours has
caught it, and saying "wrong input" would hide it.
"""

import re

from irpe.errors import UserError

_IN_WORKER = "in DataLoader worker process"
_BETWEEN_PROCESSES = ("gloo/", "NCCL", "TCPStore")  # in what torch says of their connections
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def is_of_user(error: Exception) -> bool:
    """Returns whether a failure is the user's to mend, rather than a defect of irpe."""
    if isinstance(error, UserError) or (isinstance(error, OSError) and error.errno is not None):
        return True
    if isinstance(error, ModuleNotFoundError):
        return not (error.name or "").startswith("irpe")
    return is_out_of_memory(error) or is_lost_process(error)


def is_out_of_memory(error: Exception) -> bool:
    """Returns whether memory ran out; torch has a plain `RuntimeError` for that of the CPU."""
    text = str(error)
    is_torch = isinstance(error, RuntimeError) and any(words in text for words in _NO_MEMORY)
    return isinstance(error, MemoryError) or is_torch


def is_lost_process(error: Exception) -> bool:
    """Returns whether another process of a run of several ended, or did not answer in time."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(words in text for words in _BETWEEN_PROCESSES)


def message_of(error: Exception) -> str:
    """Returns what an error says, in one line."""
    text = str(error)
    if is_out_of_memory(error):
        return "out of memory: choose smaller batches, images or grids, or another machine"
    if is_lost_process(error):
        return (
            "another process of this run ended, cannot be reached, or did not answer within "
            f"IRPE_TIMEOUT ({_reason(text)}): see its own output, then start all of them again; a "
            "run goes on with irpe train --resume"
        )
    if _IN_WORKER in text:
        text = text.strip().splitlines()[-1].partition(": ")[2]
    return " ".join(text.split()) or type(error).__name__


def _reason(text: str) -> str:
    """Returns what torch says of a connection, without its source file and its advice."""
    return " ".join(re.sub(r"\[/\S+\]", "", text).split()).partition(". ")[0][:120]
