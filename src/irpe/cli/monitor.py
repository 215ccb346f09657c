"""A progress bar for a run: how far, how fast, how long still; a line for each epoch."""

import os
import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import track as rich_track

from irpe.train.config import RunConfig

_SHOWN = {
    "train_loss": "train {:.3f}",
    "val_loss": "val {:.3f}",
    "top1": "top-1 {:5.2f}",
    "top5": "top-5 {:5.2f}",
    "AP": "AP {:.3f}",
    "AP50": "AP50 {:.3f}",
    "AP75": "AP75 {:.3f}",
    "images_per_second": "{:.0f} images/s",
}


class ProgressMonitor:
    """Shows a run in a terminal; elsewhere only the lines of the epochs.

    Args:
        is_shown: Whether this process shows anything.
    """

    def __init__(self, is_shown: bool = True) -> None:
        self.console = Console(stderr=True, quiet=not is_shown, highlight=False)
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}"),
            TextColumn("{task.fields[rate]}/s"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not is_shown or not sys.stderr.isatty(),
        )
        self.epochs, self.task = 0, TaskID(0)
        self.first = 0

    def __enter__(self) -> "ProgressMonitor":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def start(self, config: RunConfig, steps: int, done: int) -> None:
        """Begins a bar over all steps of a run."""
        self.epochs, self.first = config.epochs, done
        self.task = self.progress.add_task(
            "training", total=steps * config.epochs, completed=done, loss=float("nan"), rate="-"
        )

    def step(self, done: int, loss: float, num_images: int) -> None:
        """Moves the bar."""
        task = self.progress.tasks[0]
        seconds = task.elapsed or 0.0
        rate = f"{(done - self.first) * num_images / seconds:.0f} images" if seconds else "-"
        self.progress.update(self.task, completed=done, loss=loss, rate=rate)

    def epoch(self, row: dict[str, float]) -> None:
        """Prints the numbers of an epoch."""
        shown = [text.format(row[name]) for name, text in _SHOWN.items() if name in row]
        self.console.print(f"epoch {int(row['epoch']):>3}/{self.epochs}  {'  '.join(shown)}")


def track(work: Iterable[Any], count: int, name: str) -> Iterable[Any]:
    """Shows a bar over some long work, in a terminal, once for all processes."""
    is_shown = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
    return rich_track(work, name, count, console=Console(stderr=True), disable=not is_shown)
