"""Cells sent to an executor, watched in their folders, stopped together, failures named."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from irpe.ablation.cells import Cell, CellResult, read_result
from irpe.ablation.executors import Executor
from irpe.ablation.worker import OUTPUT, CellState, read_state, run_apart
from irpe.progress import Event, Listener, silent
from irpe.train.processes import StoppedError, stop_requests

_PAUSE = 0.25  # seconds between two looks


@dataclass(frozen=True)
class Failure:
    """A cell that failed.

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
class Outcome:
    """What all cells came to.

    Args:
        results: Of the cells that ended, in the order of the cells.
        failures: Of those that failed.
    """

    results: list[CellResult] = field(default_factory=list[CellResult])
    failures: list[Failure] = field(default_factory=list[Failure])


def run_cells(cells: Sequence[Cell], executor: Executor, listen: Listener = silent) -> Outcome:
    """Runs every cell that has not ended yet, and returns what all of them came to.

    Args:
        cells: The cells.
        executor: Runs them.
        listen: Hears of each step of a cell, and at its end of its result or failure.

    Raises:
        StoppedError: The process was asked to stop; what became of running cells is said.
    """
    found: dict[str, CellResult | Failure] = {}
    states: dict[str, CellState] = {}
    for cell in cells:
        if (result := read_result(cell)) is not None:
            found[cell.name] = result
            listen(Event(cell.name, result=result))
    left = [cell for cell in cells if cell.name not in found]
    with stop_requests() as stopped:
        futures = {cell.name: (cell, executor.submit(run_apart, cell)) for cell in left}
        while futures and not stopped.is_set():
            for name, (cell, future) in list(futures.items()):
                if future.done():
                    found[name] = _result_of(cell, future)
                    listen(Event(name, result=found[name]))
                    del futures[name]
                elif (state := read_state(cell)) is not None and state != states.get(name):
                    states[name] = state
                    time_left = remaining([each for each, _ in futures.values()], states)
                    values = {} if time_left is None else {"remaining": time_left}
                    listen(Event(name, state.done, state.total, values))
            time.sleep(_PAUSE)
        if stopped.is_set() and futures:
            stop: Any = getattr(executor, "stop", None)
            for _, future in () if stop else futures.values():
                future.cancel()
            words = stop() if stop else "the others are cancelled"
            done = sum(read_result(cell) is not None for cell in cells)
            text = f"stopped after {done} of {len(cells)} cells, {words}"
            raise StoppedError(text, stopped.number)
    ended = [found[cell.name] for cell in cells]
    failures = [each for each in ended if isinstance(each, Failure)]
    return Outcome([each for each in ended if not isinstance(each, Failure)], failures)


def remaining(cells: Sequence[Cell], states: dict[str, CellState]) -> float | None:
    """Returns the seconds until all cells have ended; `None` before the first steps.

    Args:
        cells: The cells that have not ended.
        states: How far cells are, or were, by name.
    """
    paces = {name.rpartition(",")[0]: each.pace for name, each in states.items() if each.pace}
    if not paces:
        return None
    usual, total = fmean(paces.values()), max(state.total for state in states.values())
    running = [states[cell.name] for cell in cells if cell.name in states]
    steps = [total - states.get(cell.name, CellState()).done for cell in cells]
    times = [n * paces.get(cell.row.name, usual) for n, cell in zip(steps, cells, strict=True)]
    return max(sum(times) / max(len(running), 1), *times)


def _result_of(cell: Cell, future: Any) -> CellResult | Failure:
    """Returns the result of a cell that has ended, or why it failed."""
    try:
        return future.result()
    except Exception as error:
        return Failure(cell, str(error) or type(error).__name__)
