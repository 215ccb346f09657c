"""Which failures of a command are the user's to mend, and which are defects of irpe.

What a user can cause is checked where it enters, and the check raises an error on purpose. So an
error is the user's if a `raise` statement of this package raised it (in the list `_ON_PURPOSE`, to
which `assert` does not belong), or if it is the machine's: the operating system refused something,
memory ran out, a package is missing, another process of the run was lost. Everything else, a
`KeyError` or an error from within another library, is a defect: no check of ours has caught it, and
saying "wrong input" would hide it.
"""

import dis
import re
from pathlib import Path
from types import TracebackType

_PACKAGE = str(Path(__file__).parents[1])
_ON_PURPOSE = (ValueError, TypeError, OSError, ImportError, ArithmeticError, RuntimeError)
_IN_WORKER = "in DataLoader worker process"
_FRAME = re.compile(r'^  File "(.+)", line \d+, in .+\n    (.*)$', re.MULTILINE)
_BETWEEN_PROCESSES = ("gloo/", "NCCL", "TCPStore")  # in what torch says of their connections
_NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory")


def is_of_user(error: Exception) -> bool:
    """Returns whether a failure is the user's to mend, rather than a defect of irpe."""
    if isinstance(error, OSError) and error.errno is not None:
        return True
    if isinstance(error, ModuleNotFoundError):
        return not (error.name or "").startswith("irpe")
    if is_out_of_memory(error) or is_lost_process(error):
        return True
    return isinstance(error, _ON_PURPOSE) and _is_raised_here(error)


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


def _is_raised_here(error: Exception) -> bool:
    """Returns whether a `raise` statement of this package raised an error."""
    if _IN_WORKER in str(error):  # torch raises it again, with the text of its traceback
        frames = _FRAME.findall(str(error))
        return bool(frames) and _is_ours(frames[-1][0]) and frames[-1][1].startswith("raise")
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last is not None and _is_ours(last.tb_frame.f_code.co_filename) and _is_raise(last)


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(_PACKAGE)


def _is_raise(entry: TracebackType) -> bool:
    """Returns whether a frame stopped at a `raise`, not in a call of a built-in function."""
    code = entry.tb_frame.f_code
    at = next(i for i in dis.get_instructions(code) if i.offset == entry.tb_lasti)
    return at.opname == "RAISE_VARARGS"
