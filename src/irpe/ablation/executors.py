"""What runs cells: anything that has `submit`, by default processes of this machine."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Protocol

from irpe.ablation.cells import Cell, CellResult
from irpe.ablation.worker import CellError, CellProcess

Work = Callable[[Cell], CellResult]


class Executor(Protocol):
    """Whatever runs cells: `concurrent.futures`, a Dask client, or one of the classes here.

    An executor may have `stop()`, which is called when the ablation is asked to stop and returns in
    words what becomes of its cells.
    """

    def submit(self, work: Work, cell: Cell, /) -> Any:
        """Has a cell run some time, and returns what has `done()` and `result()`."""
        ...


class LocalProcesses:
    """Processes of this machine, each with one thread, and with a GPU where there are GPUs.

    Args:
        jobs: How many cells run at a time.
        devices: The GPUs as CUDA_VISIBLE_DEVICES names them, one for each job; none: the CPU.
    """

    def __init__(self, jobs: int, devices: Sequence[str] = ()) -> None:
        self.pool, self.is_stopping = ThreadPoolExecutor(jobs), False
        self.devices = list(devices) or [None] * jobs
        self.free = SimpleQueue[int]()
        for index in range(jobs):
            self.free.put(index)
        self.processes: dict[int, CellProcess] = {}

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
