"""What a run writes as it goes: a table of epochs (CSV), and curves for TensorBoard."""

import csv
import io
from pathlib import Path
from typing import Any

from irpe.extras import require
from irpe.files import write_text

METRICS = "metrics.csv"


class Logs:
    """The log files of a run.

    Args:
        directory: The run's directory; `None` writes nothing, as in all processes but the first.
        done: The steps that are done: what an interrupted run logged after them is discarded.
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
        """Logs the loss and the learning rate of a step."""
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
