"""Processes that run cells, with one thread each; what a cell says of itself is in its folder."""

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
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from queue import SimpleQueue
from typing import Any

import torch

from irpe.ablation.cells import Cell, CellResult, read_result, run_cell
from irpe.progress import Event
from irpe.train.processes import StoppedError

OUTPUT = "output.txt"  # what a cell's process printed
STATE = "state.json"
_DONE = b"irpe: the cell has ended\n"
_PAUSE = 0.5  # seconds between two states
_PATIENCE = 60  # seconds for a process that was killed to let the directory go


class CellError(RuntimeError):
    """A cell that failed, and why."""


@dataclass(frozen=True)
class CellState:
    """How far a cell is, as it says itself."""

    done: int = 0  # steps
    total: int = 0
    pace: float | None = None  # seconds of a step
    failure: str = ""  # why it failed, if it did


def read_state(cell: Cell) -> CellState | None:
    """Returns how far a cell is; `None` if it has not begun, or is writing it."""
    try:
        return CellState(**json.loads((cell.directory / STATE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def write_state(cell: Cell, state: CellState) -> None:
    """Writes how far a cell is; where the folder cannot be written, nobody learns of it."""
    with suppress(OSError):
        (cell.directory / STATE).write_text(json.dumps(asdict(state)))


def run_here(cell: Cell) -> CellResult:
    """Runs a cell in this process, which does nothing else; its output goes to the cell's folder.

    Raises:
        CellError: It failed; why is in its folder, too.
        StoppedError: It was asked to stop, and saved itself.
    """
    torch.set_num_threads(1)
    cell.directory.mkdir(parents=True, exist_ok=True)
    file = os.open(cell.directory / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):  # also what libraries print below Python
        os.dup2(file, stream)
    os.close(file)
    record = _Recorder(cell)
    try:
        return _when_free(lambda: run_cell(cell, record))
    except StoppedError:
        raise
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {error}"
        write_state(cell, replace(record.state, failure=reason))
        raise CellError(reason) from None


class CellProcess:
    """A process of this machine that runs one cell after the other, and ends with this one.

    Args:
        device: The GPU as CUDA_VISIBLE_DEVICES names it; `None`: those that this process sees.
    """

    def __init__(self, device: str | None = None) -> None:
        paths = os.pathsep.join(sys.path)
        own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONPATH": paths}
        own |= {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
        self.process: Any = subprocess.Popen(
            [sys.executable, "-m", "irpe.ablation.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **own},
            start_new_session=True,  # Ctrl-C is for this process, which stops its cells in order
        )
        self.cells, self.answers = self.process.stdin, self.process.stdout

    def run(self, cell: Cell) -> CellResult:
        """Runs a cell and returns its result, or raises a `CellError`."""
        with suppress(OSError, ValueError):  # it has ended, or was asked to
            pickle.dump(cell, self.cells)
            self.cells.flush()
        if _DONE in self.answers and (result := read_result(cell)) is not None:
            return result
        code, state = self.process.wait(), read_state(cell)
        raise CellError(state.failure if state is not None and state.failure else _ending(code))

    def close(self) -> None:
        """Ends it at once."""
        self.process.kill()
        with suppress(OSError), self.process:
            pass


def run_apart(cell: Cell) -> CellResult:
    """Runs a cell in a new process: safe in any thread of any program."""
    with closing(CellProcess()) as process:
        return process.run(cell)


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


class _Recorder:
    """Listens, and writes how far a cell is to its folder."""

    def __init__(self, cell: Cell) -> None:
        self.cell, self.written = cell, 0.0
        self.began: tuple[float, int] | None = None  # when, and at which step
        self.state = CellState()
        write_state(self.cell, self.state)

    def __call__(self, event: Event) -> None:
        if event.work != "training":
            return
        now = time.monotonic()
        began, first = self.began = self.began or (now, event.done)
        pace = (now - began) / (event.done - first) if event.done > first else None
        self.state = CellState(event.done, event.total, pace)
        if event.done == event.total or now - self.written > _PAUSE:
            self.written = now
            write_state(self.cell, self.state)


def _serve() -> None:
    """Runs the cells that come from the parent, one after the other, until it ends."""
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    cells = SimpleQueue[Cell]()

    def listen() -> None:
        with suppress(EOFError, OSError):
            while True:
                cells.put(pickle.load(sys.stdin.buffer))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            run_here(cells.get())
        except (CellError, StoppedError):
            os._exit(1)  # not by the interpreter, which waits for the thread that listens
        answers.write(_DONE)


if __name__ == "__main__":
    _serve()
