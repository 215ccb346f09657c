"""What runs cells: anything that has `submit`, by default processes of this machine."""

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from typing import Any, Protocol

import torch

from irpe.ablation.cells import Cell, CellResult, read_result
from irpe.ablation.worker import (
    OUTPUT,
    CellError,
    CellProcess,
    CellState,
    read_state,
    run_apart,
)
from irpe.errors import UserError
from irpe.progress import Event, Listener, silent
from irpe.train.processes import StoppedError, stop_requests

Work = Callable[[Cell], CellResult]
_PAUSE = 0.25  # seconds between two looks
_USUAL = 10**9  # bytes of a cell's process


class Executor(Protocol):
    """Whatever runs cells: `concurrent.futures`, a Dask client, or one of the classes here.

    An executor may have `stop()`, which is called when the ablation is asked to stop and returns in
    words what becomes of its cells.
    """

    def submit(self, work: Work, cell: Cell, /) -> Any:
        """Has a cell run some time, and returns what has `done()` and `result()`."""
        ...


@dataclass(frozen=True)
class Failure:
    """A cell that failed, and why."""

    cell: Cell
    reason: str

    def __str__(self) -> str:
        output = self.cell.directory / OUTPUT
        return f"{self.cell.name} failed: {self.reason} (its output: {output})"


class LocalProcesses:
    """Processes of this machine, each with one thread, and with a GPU where there are GPUs.

    Args:
        jobs: How many cells run at a time.
        devices: The GPUs as CUDA_VISIBLE_DEVICES names them, one for each job; none: the CPU.
    """

    def __init__(self, jobs: int, devices: Sequence[str] = ()) -> None:
        self.jobs, self.devices = jobs, list(devices) or [None] * jobs
        self.pool, self.is_stopping = ThreadPoolExecutor(jobs), False
        self.free = SimpleQueue[int]()
        for index in range(jobs):
            self.free.put(index)
        self.processes: dict[int, CellProcess] = {}

    def __str__(self) -> str:
        one = "CPU" if self.devices[0] is None else "GPU"
        return f"{one}, {self.jobs} cell{'s' * (self.jobs > 1)} at a time, one thread each"

    def submit(self, work: Work, cell: Cell, /) -> "Future[CellResult]":
        """Has a cell run when a process is free, which needs no other `work` than the usual."""
        return self.pool.submit(self._run, cell)

    def stop(self) -> str:
        """Asks all cells to save themselves, and waits until they have."""
        self.is_stopping = True
        for process in list(self.processes.values()):
            process.cells.close()
        self.pool.shutdown(cancel_futures=True)
        return "all saved"

    def __enter__(self) -> "LocalProcesses":
        return self

    def __exit__(self, *error: object) -> None:
        """Ends the processes; after an error or a second Ctrl-C in the middle of their cells."""
        self.pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self.processes.values()):
            process.close()

    def _run(self, cell: Cell) -> CellResult:
        index = self.free.get()
        try:
            if index not in self.processes:
                self.processes[index] = CellProcess(self.devices[index])
            process = self.processes[index]
            if self.is_stopping:
                process.cells.close()
            return process.run(cell)
        except CellError:
            self.processes.pop(index).close()
            raise
        finally:
            self.free.put(index)


def gpus() -> list[str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(index) for index in range(count)]


def choose_jobs(requested: int | None, num_cells: int, num_gpus: int) -> int:
    """Returns how many cells run at a time: by default what GPUs, or cores and memory, allow."""
    if requested is None:
        by_memory = max(1.0, available_memory() / _USUAL)
        return int(min(num_gpus or available_cores(), by_memory, num_cells))
    if requested < 1 or (num_gpus and requested > num_gpus):
        most = f"{num_gpus}, the number of GPUs" if num_gpus else "as many as the memory allows"
        raise UserError(f"jobs = {requested} must be 1 to {most}")
    return min(requested, num_cells)


def available_cores() -> int:
    """Returns how many cores this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def available_memory() -> float:
    """Returns the bytes of memory that are free, within the limit of a container; inf: unknown."""
    found = [math.inf]
    with suppress(OSError, ValueError, IndexError):
        free = Path("/proc/meminfo").read_text().split("MemAvailable:")[1]
        found.append(1024 * int(free.split()[0]))
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        found.append(int(limit.read_text()) - int(used.read_text()))
    return min(found)


def run_cells(
    cells: Sequence[Cell], executor: Executor, listen: Listener = silent
) -> list[CellResult | Failure]:
    """Runs every cell that has not ended yet, and returns what each of them came to.

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
                    try:
                        found[name] = future.result()
                    except Exception as error:
                        found[name] = Failure(cell, str(error) or type(error).__name__)
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
    return [found[cell.name] for cell in cells]


def remaining(cells: Sequence[Cell], states: dict[str, CellState]) -> float | None:
    """Returns the seconds until some cells have ended; `None` before the first steps.

    Cells of one row are as fast as each other; `states` says how far cells are, or were, by name.
    """
    paces = {name.rpartition(",")[0]: each.pace for name, each in states.items() if each.pace}
    if not paces:
        return None
    usual, total = fmean(paces.values()), max(state.total for state in states.values())
    running = [states[cell.name] for cell in cells if cell.name in states]
    steps = [total - states.get(cell.name, CellState()).done for cell in cells]
    times = [n * paces.get(cell.row.name, usual) for n, cell in zip(steps, cells, strict=True)]
    return max(sum(times) / max(len(running), 1), *times)
