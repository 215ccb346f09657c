"""One cell in a process of its own, with one thread: what it does and what it tells its parent."""

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from irpe.ablation.cells import Cell, run_cell
from irpe.train.signals import StoppedError

OUTPUT = "output.txt"  # what a cell's process printed

# What a cell tells: ("started", steps, done), ("step", done, seconds), ("evaluated", seconds), and
# at its end ("result", CellResult), ("stopped", text) or ("failed", text).
Message = tuple[Any, ...]


def run_worker(cell: Cell, parent: "Connection[Any, Any]", device: str | None) -> None:
    """Runs a cell, and tells the parent how it goes; stops when told to, or when the parent ends.

    Args:
        cell: The cell.
        parent: The connection to the process that started this one.
        device: The GPU to use, as CUDA_VISIBLE_DEVICES names it; `None` for the CPU.
    """
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C is for the parent, which stops its cells in order
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    torch.set_num_threads(1)
    cell.directory.mkdir(parents=True, exist_ok=True)
    _keep_output(cell.directory / OUTPUT)
    threading.Thread(target=_stop_when_told, args=(parent,), daemon=True).start()
    try:
        parent.send(("result", run_cell(cell, _Teller(parent))))
    except StoppedError as stop:
        parent.send(("stopped", str(stop)))
    except Exception as error:
        traceback.print_exc()
        parent.send(("failed", f"{type(error).__name__}: {error}"))
        sys.exit(1)


def _keep_output(path: Path) -> None:
    """Sends what this process prints to a file, also what libraries print below Python."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)


def _stop_when_told(parent: "Connection[Any, Any]") -> None:
    with suppress(EOFError, OSError):  # the end of the parent means the same
        parent.recv()
    os.kill(os.getpid(), signal.SIGTERM)


class _Teller:
    """Tells the parent how the training of a cell goes.

    Args:
        parent: The connection to it.
    """

    def __init__(self, parent: "Connection[Any, Any]") -> None:
        self.parent, self.last = parent, time.perf_counter()

    def start(self, name: str, total: int, done: int = 0) -> None:
        """Training begins, or goes on."""
        self.parent.send(("started", total, done))
        self.last = time.perf_counter()

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """A step is done."""
        self.parent.send(("step", done, self._lap()))

    def report(self, name: str, values: Mapping[str, float]) -> None:
        """An epoch has ended, with an evaluation or without."""
        self.parent.send(("evaluated", self._lap()))

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        return seconds
