"""A progress bar on the terminal: how far, how fast, how long still; a line for each result."""

import math
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
    "class_accuracy": "classes {:5.2f}",
    "AP": "AP {:.3f}",
    "AP50": "AP50 {:.3f}",
    "AP75": "AP75 {:.3f}",
    "APs": "AP small {:.3f}",
    "APm": "AP medium {:.3f}",
    "APl": "AP large {:.3f}",
    "effect": "effect {:.1%}",
    "images_per_second": "{:.0f} images/s",
    "broken": "{:.0f} unreadable",
    "val_broken": "{:.0f} unreadable",
}  # what the columns of a run's table are called
_OF_AN_EPOCH = (
    "train_loss", "val_loss", "top1", "mIoU", "AP", "AP50", "effect", "images_per_second", "broken",
)  # fmt: skip
_IF_ANY = ("broken", "val_broken")


def format_results(values: Mapping[str, float]) -> str:
    """Returns columns of a run's table in words; what is not a number, or there is none of, not."""
    shown = [
        text.format(values[key])
        for key, text in _RESULTS.items()
        if key in values and not math.isnan(values[key]) and (values[key] or key not in _IF_ANY)
    ]
    return "  ".join(shown)


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
        """Prints a result in a line of 80 columns: the scores that matter most."""
        chosen = {key: values[key] for key in _OF_AN_EPOCH if key in values}
        self.console.print(f"{name}  {format_results(chosen)}", soft_wrap=True)
