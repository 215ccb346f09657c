"""What a run writes down as it goes: a table of epochs (CSV), and TensorBoard's curves."""

import csv
import io
from pathlib import Path
from typing import Any, Protocol

from irpe.extras import require
from irpe.files import write_text
from irpe.train.config import RunConfig

METRICS = "metrics.csv"


class Monitor(Protocol):
    """Is told how a run goes, to show it."""

    def start(self, config: RunConfig, steps: int, done: int) -> None:
        """A run begins: its steps an epoch, and those that are done already."""
        ...

    def step(self, done: int, loss: float, num_images: int) -> None:
        """A step is done."""
        ...

    def epoch(self, row: dict[str, float]) -> None:
        """An epoch is done and evaluated."""
        ...


class Silence:
    """A monitor that shows nothing."""

    def start(self, config: RunConfig, steps: int, done: int) -> None:
        """Shows nothing."""

    def step(self, done: int, loss: float, num_images: int) -> None:
        """Shows nothing."""

    def epoch(self, row: dict[str, float]) -> None:
        """Shows nothing."""


class Logs:
    """The files of a run; writes nothing without a directory, as in all processes but the first.

    Args:
        directory: The run's directory, or `None`.
        done: The steps that are done: TensorBoard forgets what an interrupted run wrote after them.
    """

    def __init__(self, directory: Path | None, done: int) -> None:
        self.directory = directory
        self.board: Any = None
        if directory is not None:
            require("tensorboard", "train")
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(directory / "tensorboard"), purge_step=done + 1)

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *error: object) -> None:
        if self.board is not None:
            self.board.close()

    def step(self, done: int, loss: float, lr: float) -> None:
        """Notes the loss of a step."""
        if self.board is not None:
            self.board.add_scalar("step/loss", loss, done)
            self.board.add_scalar("step/lr", lr, done)

    def epoch(self, history: list[dict[str, float]]) -> None:
        """Writes the table of all epochs so far."""
        if self.directory is None:
            return
        for name, value in history[-1].items():
            self.board.add_scalar(f"epoch/{name}", value, history[-1]["epoch"])
        text = io.StringIO()
        names = max(history, key=len).keys()  # an epoch that was not evaluated has fewer
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
        write_text(self.directory / METRICS, text.getvalue())
