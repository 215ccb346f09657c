"""What people see: tables, facts, and how far work is."""

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from irpe.cli.parse import wrap
from irpe.progress import Event


def print_lines(*lines: str) -> None:
    """Prints lines as they are, whatever the width of the terminal: paths can be pasted."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def print_json(value: Any) -> None:
    """Prints a value as JSON, with what is not a number as null."""
    print_lines(json.dumps(value, indent=2))


def print_notes(*notes: str) -> None:
    """Prints what is to be said on standard error, so that standard output holds results alone."""
    lines = [line for note in notes for line in wrap(note)]
    print("\n".join(lines), file=sys.stderr, end="\n" * bool(lines))


def facts_of(facts: Mapping[str, str]) -> list[str]:
    """Returns lines for each fact: its name, then its text."""
    width = max(map(len, facts))
    return [
        line
        for name, text in facts.items()
        for line in wrap(text, f"{name:<{width}}  ", " " * (width + 2)) or [name]
    ]


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Prints a table; its first column is text, the others are numbers."""
    table = Table(box=None, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", no_wrap=index > 0)
    for row in rows:
        table.add_row(*row)
    screen = Console(highlight=False, markup=False)
    if title:
        screen.print(title, end="\n\n", soft_wrap=True)
    screen.print(table)


class ProgressBar:
    """A listener that shows a bar on standard error if it is a terminal, and a line a result.

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
        self.first, self.started = 0, 0.0

    def __enter__(self) -> "ProgressBar":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def __call__(self, event: Event) -> None:
        """Moves the bar, or prints a result in a line of 80 columns."""
        if event.result is not None:
            self.console.print(f"{event.work}  {event.result}", soft_wrap=True, markup=False)
            return
        own = [work for work in self.bar.tasks if work.description == event.work]
        if not own or own[0].completed > event.done:
            for work in self.bar.task_ids:
                self.bar.remove_task(work)
            self.bar.add_task(event.work, total=event.total, completed=event.done, measured="")
            self.first, self.started = event.done, time.perf_counter()
        self.bar.update(
            self.bar.task_ids[0], completed=event.done, total=event.total,
            measured=self._measured(event),
        )  # fmt: skip

    def _measured(self, event: Event) -> str:
        shown: list[str] = []
        if not math.isnan(loss := event.values.get("loss", math.nan)):
            shown.append(f"loss {loss:.3f}")
        if "images" in event.values:
            images = (event.done - self.first) * event.values["images"]
            seconds = time.perf_counter() - self.started
            shown.append(f"{images / seconds:.0f} images/s" if seconds else "")
        return "  ".join(shown)
