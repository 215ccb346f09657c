"""The program `irpe`: one subcommand a file, errors in one line.

Exit codes: 0 done, 1 something that the user can mend, 2 wrong usage, 70 a defect of irpe
(`irpe.cli.errors` decides which), 130 after Ctrl-C, 141 if the reader of a pipe left, 143 after
SIGTERM. With `--debug` the traceback is shown too. A warning is one line as well.
"""

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from irpe.cli.errors import is_of_user, message_of
from irpe.extras import require

_DEFECT, _INTERRUPTED, _PIPE_CLOSED, _TERMINATED = 70, 130, 141, 143


def main() -> None:
    """Runs the program; a failure is one line, not a traceback."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler speaks on stderr
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    is_debug = len(arguments) < len(sys.argv) - 1
    with _sigterm_as_exit(), _warnings_in_one_line():
        try:
            _run(arguments)
        except KeyboardInterrupt:
            sys.exit(_INTERRUPTED)
        except BrokenPipeError:
            _discard_output()
            sys.exit(_PIPE_CLOSED)
        except Exception as error:
            _fail(error, is_debug)
        finally:
            _leave_processes()


def _run(arguments: list[str]) -> None:
    require("typer", "cli")
    require("rich", "cli")
    from irpe.cli.app import app, use_words

    use_words()
    try:
        app(arguments, prog_name="irpe")
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # typer has its own way with pipes
            raise end.__context__ from None
        if sys.stdout is not None:
            sys.stdout.flush()  # here its failure can be reported, later it cannot
        raise


def _fail(error: Exception, is_debug: bool) -> NoReturn:
    """Says in one line what went wrong, and leaves."""
    _discard_output(flush=True)
    if is_debug:
        traceback.print_exception(error)
    if is_of_user(error):
        sys.exit(f"irpe: {message_of(error)}")  # which is 1
    hint = "" if is_debug else "; --debug shows where"
    print(
        f"irpe: internal error: {type(error).__name__}: {message_of(error)} (a defect of irpe, "
        f"please report it{hint})",
        file=sys.stderr,
    )
    sys.exit(_DEFECT)


def _discard_output(flush: bool = False) -> None:
    """Keeps Python from writing what is left to a pipe that is closed, or a disk that is full."""
    if sys.stdout is None:
        return
    try:
        if flush:
            sys.stdout.flush()
            return
    except OSError:
        pass
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _sigterm_as_exit() -> Generator[None]:
    """Lets SIGTERM end the program like an error does, so that no unfinished file is left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process = os.getpid()

    def end(number: int, frame: object) -> None:
        if os.getpid() != process:  # a process that loads images
            os._exit(_TERMINATED)
        sys.exit(_TERMINATED)

    def end_again(lost: Any) -> None:
        """Repeats an exit that was raised in a callback of Python, which loses exceptions."""
        if lost.exc_type is SystemExit:
            threading.Timer(0.1, os.kill, (process, signal.SIGTERM)).start()
        else:
            before_hook(lost)

    before, before_hook = signal.signal(signal.SIGTERM, end), sys.unraisablehook
    sys.unraisablehook = end_again
    try:
        yield
    finally:
        sys.unraisablehook = before_hook
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _warnings_in_one_line() -> Generator[None]:
    """Prints a warning as one line, without the source line that gave it."""

    def show(message: Warning | str, *rest: object) -> None:
        print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)

    before, warnings.showwarning = warnings.showwarning, show
    try:
        yield
    finally:
        warnings.showwarning = before


def _leave_processes() -> None:
    """Ends what joins this process with others: without it, leaving may abort the process."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
