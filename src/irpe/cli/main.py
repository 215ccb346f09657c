"""The program `irpe`: finds the command, and says in one line what failed.

Exit codes: 0 done, 1 something that the user can mend (`irpe.cli.errors` decides), 2 wrong usage,
70 a defect of irpe, 130 after Ctrl-C, 141 if the reader of a pipe left, 143 after SIGTERM. With
`--debug` the traceback is shown too. A warning is one line as well.
"""

import importlib
import os
import runpy
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from irpe.cli.errors import is_of_user, message_of
from irpe.extras import require

_USAGE, _DEFECT, _INTERRUPTED, _PIPE_CLOSED, _TERMINATED = 2, 70, 130, 141, 143

COMMANDS = {
    "ablate": ("ablate:ablate", "Compare encodings on your images."),
    "train": ("train:train", "Train a recipe, with or without an encoding."),
    "eval": ("eval:evaluate", "Score a run, an equipped model or a published checkpoint."),
    "encodings": ("encodings:encodings", "List all encodings."),
    "models": ("models:models", "Tell which models can be equipped."),
    "profile": ("profile:profile", "What encodings cost: parameters, MACs, time, memory."),
    "gpu": ("gpu:gpu", "Prove and time on this GPU what models use."),
    "make-relative": ("relative:make_relative", "Give a trained model relative positions."),
    "show": ("", "Draw the figures of the paper, and of trained runs."),
    "explore": ("explore:explore", "Open the explorer page in a browser."),
    "convert": ("convert:convert", "Convert a checkpoint that the paper's authors published."),
}  # the file and function of each, and a line for the help
FIGURES = {
    "index": ("show:index", "From distance to bucket (Fig. 2)."),
    "buckets": ("show:buckets", "Which patches share a bucket (Fig. 6-9)."),
    "cost": ("show:cost", "Extra MACs by resolution, or time and memory (Fig. 4, 10)."),
    "weights": ("show_run:weights", "What an encoding adds to the attention scores (Fig. 5)."),
    "attention": ("show_run:attention", "Attention of one patch, with the encoding and without."),
    "tables": ("show_run:tables", "How long the vector of each bucket is."),
    "locality": ("show_run:locality", "How far each block looks, with the encoding and without."),
    "star": ("show_run:star", "A moving star: buckets, and what the tables add."),
    "training": ("show_run:training", "Score and losses of runs, by epoch."),
    "positions-in": ("relative:positions_in", "Where position can be read in a model."),
    "robustness": ("robustness:robustness", "Scores at other sizes, and on images that moved."),
}  # of irpe show, those of encodings first


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


def _run(arguments: Sequence[str]) -> None:
    require("rich", "cli")
    try:
        _call(arguments)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()  # here its failure can be reported, later it cannot


def _call(words: Sequence[str]) -> None:
    """Calls the command that the words name, or prints what there is."""
    if words[:1] == ["--version"]:
        import irpe

        build = runpy.run_path(str(Path(irpe.__file__).parent / "ops/impl/native/build.py"))
        print(f"irpe {irpe.__version__}, {build['installed']()}")
        return
    rest = words[1:] if words[:1] == ["show"] else words
    if not rest or rest[0] in ("-h", "--help"):
        _print_commands(*(("irpe", COMMANDS) if rest is words else ("irpe show", FIGURES)))
        return
    from irpe.cli.parse import UsageError

    try:
        command, values = understand(words)
    except UsageError as error:
        print(f"irpe: {error}", file=sys.stderr)
        sys.exit(_USAGE)
    command(**values)


def understand(words: Sequence[str]) -> tuple[Callable[..., None], dict[str, Any]]:
    """Returns the function of the command that words name, and its arguments."""
    from irpe.cli.parse import UsageError, parse
    from irpe.errors import did_you_mean
    from irpe.train.config import SETTINGS

    table, name = COMMANDS, "irpe"
    if words[:1] == ["show"]:
        table, name, words = FIGURES, "irpe show", words[1:]
    if words[0] not in table:
        near = did_you_mean(words[0], table)
        raise UsageError(f"no command {words[0]!r}{near} ({name} --help)")
    file, _, function = table[words[0]][0].partition(":")
    module = importlib.import_module(f"irpe.cli.commands.{file}")
    command = getattr(module, function)
    configure = getattr(module, "configure", None)
    settings = getattr(module, "OFFERED", SETTINGS)
    return command, parse(command, words[1:], f"{name} {words[0]}", configure, settings)


def _print_commands(name: str, table: Mapping[str, tuple[str, str]]) -> None:
    lines = [f"  {command:<15}{text}" for command, (_, text) in table.items()]
    if table is FIGURES:
        about, runs = COMMANDS["show"][1], list(table).index("weights")
        lines = ["of encodings:", *lines[:runs], "", "of trained runs:", *lines[runs:]]
        examples = ("buckets product-contextual-k --grid 7x28", "weights runs/laptop photo.jpg")
    else:
        about = "Image relative position encodings for vision transformers."
        lines = ["commands:", *lines]
        examples = ("ablate", "train laptop --encoding K --absolute none", "eval runs/laptop")
    lines += ["", "examples:", *(f"  {name} {example}" for example in examples), ""]
    end = f"{name} COMMAND --help describes one; --debug shows where an error comes from."
    print("\n".join([f"usage: {name} COMMAND [options]", "", about, "", *lines, end]))


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
