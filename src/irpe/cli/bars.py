"""A progress bar on the terminal: how far, how fast, how long still; a line for each result."""

import os
import sys
import time
from collections.abc import Mapping

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

_RESULTS = {
    "train_loss": "train {:.3f}",
    "val_loss": "val {:.3f}",
    "top1": "top-1 {:5.2f}",
    "top5": "top-5 {:5.2f}",
    "mIoU": "mIoU {:5.2f}",
    "pixel_accuracy": "pixels {:5.2f}",
    "AP": "AP {:.3f}",
    "AP50": "AP50 {:.3f}",
    "AP75": "AP75 {:.3f}",
    "effect": "encoding {:.1%}",
    "images_per_second": "{:.0f} images/s",
}


class ProgressBar:
    """Shows progress on stderr: a bar if it is a terminal, and a line for each result.

    In a run of several processes the first one alone shows it.
    """

    def __init__(self) -> None:
        is_first = os.environ.get("RANK", "0") == "0"
        self.console = Console(stderr=True, quiet=not is_first, highlight=False)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measured]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
            disable=not is_first or not sys.stderr.isatty(),
        )
        self.work = TaskID(0)
        self.first, self.started = 0, 0.0

    def __enter__(self) -> "ProgressBar":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def start(self, name: str, total: int, done: int = 0) -> None:
        """Begins a bar; it replaces the one before."""
        for work in self.bar.task_ids:
            self.bar.remove_task(work)
        self.work = self.bar.add_task(name, total=total, completed=done, measured="")
        self.first, self.started = done, time.perf_counter()

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """Moves the bar."""
        shown: list[str] = []
        if "loss" in values:
            shown.append(f"loss {values['loss']:.3f}")
        if "images" in values:
            images = (done - self.first) * values["images"]
            shown.append(f"{images / (time.perf_counter() - self.started):.0f} images/s")
        self.bar.update(self.work, completed=done, measured="  ".join(shown))

    def report(self, name: str, values: Mapping[str, float]) -> None:
        """Prints a result."""
        shown = [text.format(values[key]) for key, text in _RESULTS.items() if key in values]
        self.console.print(f"{name}  {'  '.join(shown)}")
