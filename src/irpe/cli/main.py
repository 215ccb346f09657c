"""The program `irpe`: one subcommand a file, errors in one line."""

import os
import sys

from irpe.extras import require


def main() -> None:
    """Runs the program; an error that the user can mend is one line, not a traceback."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler speaks on stderr
    try:
        require("typer", "cli")
        require("rich", "cli")
        from irpe.cli.app import app

        app(prog_name="irpe")
    except SystemExit:
        _leave_processes()
        raise
    except (ValueError, OSError, FloatingPointError, ModuleNotFoundError) as error:
        if os.environ.get("IRPE_TRACEBACK"):
            raise
        sys.exit(f"irpe: {_message(error)}")


def _leave_processes() -> None:
    """Ends what joins this process with others: without it, leaving may abort the process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _message(error: Exception) -> str:
    """Returns what an error says; one from a process that reads images comes with its traceback."""
    text = str(error)
    if "in DataLoader worker process" not in text:
        return text
    return text.strip().splitlines()[-1].partition(": ")[2]
