"""A cell in a process of its own, with one thread; what it says of itself is in its folder."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from irpe.ablation.cells import Cell, CellResult, read_result, run_cell
from irpe.progress import Event
from irpe.train.signals import StoppedError

OUTPUT = "output.txt"  # what a cell's process printed
STATE = "state.json"
_PAUSE = 0.5  # seconds between two states
_PATIENCE = 60  # seconds for a process that was killed to let the directory go


class CellError(RuntimeError):
    """A cell that failed, and why."""


@dataclass(frozen=True)
class CellState:
    """How far a cell is, as it says itself.

    Args:
        done: The steps done so far.
        total: All steps.
        first: The steps that were done before this process.
        seconds: Since its process began.
        failure: Why it failed, if it did.
    """

    done: int = 0
    total: int = 0
    first: int = 0
    seconds: float = 0.0
    failure: str = ""

    @property
    def pace(self) -> float | None:
        """The seconds of a step, if known."""
        steps = self.done - self.first
        return self.seconds / steps if steps > 0 else None


def read_state(cell: Cell) -> CellState | None:
    """Returns how far a cell is; `None` if it has not begun, or is writing it."""
    try:
        return CellState(**json.loads((cell.directory / STATE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def run_here(cell: Cell) -> CellResult:
    """Runs a cell in this process, which does nothing else; its output goes to the cell's folder.

    Raises:
        CellError: It failed; why is in its folder, too.
        StoppedError: It was asked to stop, and saved itself.
    """
    torch.set_num_threads(1)
    cell.directory.mkdir(parents=True, exist_ok=True)
    _send_output_to_folder(cell)
    record = _Recorder(cell)
    try:
        return _when_free(lambda: run_cell(cell, record))
    except StoppedError:
        raise
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        record.write(failure=reason)
        raise CellError(reason) from None


def run_apart(cell: Cell) -> CellResult:
    """Runs a cell in a new process, and returns its result: safe in any thread of any program.

    Raises:
        CellError: It failed, or its process was ended.
    """
    command = [sys.executable, "-m", "irpe.ablation.worker"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, env=environment, start_new_session=True
    ) as process:
        assert process.stdin is not None
        with suppress(BrokenPipeError):
            pickle.dump(cell, process.stdin)
            process.stdin.flush()
        code = process.wait()  # its input stays open as long as this process lives
    return collect_result(cell, code)


def collect_result(cell: Cell, code: int) -> CellResult:
    """Returns the result of a cell whose process has ended, or raises an error that says why.

    Args:
        cell: The cell.
        code: How its process ended.
    """
    result = read_result(cell) if code == 0 else None
    if result is not None:
        return result
    state = read_state(cell)
    raise CellError(state.failure if state is not None and state.failure else _ending(code))


def stop_at_end_of(read: Callable[[], Any]) -> None:
    """Asks this process to stop when the other end of a connection is closed, or ends.

    Args:
        read: Blocks until then.
    """

    def wait() -> None:
        with suppress(EOFError, OSError):
            read()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def _when_free(run: Callable[[], CellResult]) -> CellResult:
    """Runs a cell once a process that was killed has let its directory go."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            return run()
        except ValueError as error:
            if "is in use by" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(1)


def _ending(code: int) -> str:
    if code >= 0:
        return f"its process ended with code {code}"
    name = signal.Signals(-code).name
    hint = ", perhaps for lack of memory: run fewer at a time" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"


def _send_output_to_folder(cell: Cell) -> None:
    """Sends what this process prints to a file, also what libraries print below Python."""
    file = os.open(cell.directory / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


class _Recorder:
    """Writes how far a cell is to its folder.

    Args:
        cell: The cell.
    """

    def __init__(self, cell: Cell) -> None:
        self.path, self.began, self.written = cell.directory / STATE, time.monotonic(), 0.0
        self.first: int | None = None
        self.done, self.total = 0, 0

    def __call__(self, event: Event) -> None:
        if event.work != "training":
            return
        self.done, self.total = event.done, event.total
        if self.first is None:
            self.first, self.began = event.done, time.monotonic()
        if event.done == event.total or time.monotonic() - self.written > _PAUSE:
            self.write()

    def write(self, failure: str = "") -> None:
        self.written = time.monotonic()
        seconds = round(self.written - self.began, 3)
        state = CellState(self.done, self.total, self.first or 0, seconds, failure)
        with suppress(OSError):
            self.path.write_text(json.dumps(state.__dict__))


if __name__ == "__main__":
    given: Cell = pickle.load(sys.stdin.buffer)
    stop_at_end_of(lambda: os.read(0, 1))
    try:
        run_here(given)
    except CellError:
        sys.exit(1)
    except StoppedError as stop:
        sys.exit(128 + stop.number)
