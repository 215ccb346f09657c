"""Cells side by side: processes with one thread each, stopped together, failures named."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

from irpe.ablation.cells import Cell, read_result
from irpe.ablation.pace import Pace
from irpe.ablation.results import CellResult, ClassifierResult, SegmenterResult
from irpe.ablation.worker import OUTPUT, Message, run_worker
from irpe.train.signals import StoppedError, stop_requests

_PATIENCE = 0.25  # seconds between looks at requests to stop
_METHOD = "forkserver" if os.name == "posix" else "spawn"


class Board(Protocol):
    """Is told how the cells go, to show it."""

    def start(self, cell: Cell) -> None:
        """A cell begins."""
        ...

    def step(self, cell: Cell, fraction: float, remaining: float | None) -> None:
        """A step of a cell is done.

        Args:
            cell: The cell.
            fraction: How much of its training is done.
            remaining: The seconds until all cells have ended, if known.
        """
        ...

    def end(self, cell: Cell, found: "CellResult | Failure") -> None:
        """A cell has ended, or had ended before."""
        ...


class NoBoard:
    """Shows nothing."""

    def start(self, cell: Cell) -> None:
        """Shows nothing."""

    def step(self, cell: Cell, fraction: float, remaining: float | None) -> None:
        """Shows nothing."""

    def end(self, cell: Cell, found: "CellResult | Failure") -> None:
        """Shows nothing."""


@dataclass(frozen=True)
class Failure:
    """A cell whose process failed.

    Args:
        cell: The cell.
        reason: Why, in a line.
    """

    cell: Cell
    reason: str

    def __str__(self) -> str:
        output = self.cell.directory / OUTPUT
        return f"{self.cell.name} failed: {self.reason} (its output: {output})"


@dataclass
class _Running:
    """A cell that runs."""

    cell: Cell
    process: BaseProcess
    slot: int
    reason: str = ""
    result: CellResult | None = None


@dataclass
class Outcome:
    """What all cells came to.

    Args:
        results: Of the cells that ended, in the order of the cells.
        failures: Of those that failed.
    """

    results: list[CellResult] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


def run_cells(
    cells: Sequence[Cell],
    jobs: int,
    devices: Sequence[str] = (),
    board: Board | None = None,
) -> Outcome:
    """Runs every cell that has not ended yet, and returns what all of them came to.

    Args:
        cells: The cells.
        jobs: How many run at a time, each in a process with one thread.
        devices: The GPUs, one for each job; none: the CPU.
        board: Is told how it goes.

    Raises:
        StoppedError: The process was asked to stop; all running cells have saved themselves.
    """
    return _Runner(cells, jobs, devices, board or NoBoard()).run()


class _Runner:
    def __init__(
        self, cells: Sequence[Cell], jobs: int, devices: Sequence[str], board: Board
    ) -> None:
        self.cells, self.board, self.devices = cells, board, devices
        self.results = {cell.name: read_result(cell) for cell in cells}
        self.waiting = deque(cell for cell in cells if self.results[cell.name] is None)
        self.pace = Pace(self.waiting, jobs)
        self.slots = list(range(jobs))[::-1]
        self.running: dict[Connection[Any, Any], _Running] = {}
        self.failures: list[Failure] = []
        self.context: Any = multiprocessing.get_context(_METHOD)

    def run(self) -> Outcome:
        for cell in self.cells:
            found = self.results[cell.name]
            if found is not None:
                self.board.end(cell, found)
        if self.waiting and _METHOD == "forkserver":
            self.context.set_forkserver_preload(["irpe.ablation.worker"])
        with stop_requests() as stopped:
            try:
                while self.running or (self.waiting and not stopped.is_set()):
                    self._look(is_stopped=stopped.is_set())
            finally:
                self._kill()
            if stopped.is_set():
                done = sum(found is not None for found in self.results.values())
                raise StoppedError(
                    f"stopped after {done} of {len(self.cells)} cells, all saved", stopped.number
                )
        return Outcome([r for r in self.results.values() if r is not None], self.failures)

    def _look(self, is_stopped: bool) -> None:
        """Starts what can be started, and hears what running cells tell."""
        while self.waiting and self.slots and not is_stopped:
            self._start(self.waiting.popleft())
        if is_stopped:
            self._ask_to_stop()
        for connection in wait(list(self.running), _PATIENCE):
            assert isinstance(connection, Connection)
            try:
                self._hear(self.running[connection], connection.recv())
            except (EOFError, OSError):
                self._end(self.running.pop(connection), is_stopped)

    def _start(self, cell: Cell) -> None:
        own, other = self.context.Pipe()
        slot = self.slots.pop()
        device = self.devices[slot] if self.devices else None
        process = self.context.Process(target=run_worker, args=(cell, other, device))
        process.start()
        other.close()  # so that the end of the process is the end of the connection
        self.running[own] = _Running(cell, process, slot)
        self.board.start(cell)

    def _ask_to_stop(self) -> None:
        for connection in self.running:
            with suppress(OSError):  # it may have ended
                connection.send("stop")

    def _hear(self, run: _Running, message: Message) -> None:
        match message:
            case ("started", int(steps), int(done)):
                self.pace.start(run.cell, steps, done)
            case ("step", int(done), float(seconds)):
                self.pace.step(run.cell, done, seconds)
                fraction = self.pace.fraction(run.cell)
                self.board.step(run.cell, fraction, self.pace.remaining())
            case ("evaluated", float(seconds)):
                self.pace.evaluate(seconds)
            case ("result", (ClassifierResult() | SegmenterResult()) as result):
                run.result = result
            case (_, str(reason)):
                run.reason = reason
            case _:
                raise AssertionError(message)

    def _end(self, run: _Running, is_stopped: bool) -> None:
        run.process.join()
        self.slots.append(run.slot)
        self.pace.end(run.cell)
        if run.result is not None:
            self.results[run.cell.name] = run.result
            self.board.end(run.cell, run.result)
        elif not is_stopped:
            failure = Failure(run.cell, run.reason or _ending(run.process.exitcode))
            self.failures.append(failure)
            self.board.end(run.cell, failure)

    def _kill(self) -> None:
        """Ends what still runs, after an error or a second Ctrl-C."""
        for run in self.running.values():
            run.process.kill()
            run.process.join()


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"its process ended with code {code}"
    name = signal.Signals(-code).name
    hint = ", perhaps for lack of memory: choose fewer --jobs" if name == "SIGKILL" else ""
    return f"its process was ended by {name}{hint}"
