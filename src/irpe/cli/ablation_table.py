"""The table of an ablation while it runs; where there is no terminal, a line for each cell."""

import time
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

from irpe.progress import Event

if TYPE_CHECKING:
    from collections.abc import Sequence

    from irpe.ablation.cells import Cell

_PAUSE = 0.25  # seconds between two drawings


class LiveTable:
    """Shows the scores of finished cells, how far the running ones are, and the time that is left.

    Args:
        cells: All cells.
        console: Where it is shown.
        title: What the scores are.
    """

    def __init__(self, cells: "Sequence[Cell]", console: Console, title: str = "top-1 (%)") -> None:
        self.cells, self.console, self.title = cells, console, title
        self.shown: dict[str, str] = {}
        self.ended, self.drawn = 0, 0.0
        self.remaining: float | None = None
        self.live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> "LiveTable":
        if self.console.is_terminal:
            self.live.start()
            self._draw()
        return self

    def __exit__(self, *error: object) -> None:
        if self.console.is_terminal:
            self._draw()
            self.live.stop()

    def __call__(self, event: Event) -> None:
        """Shows a step of a cell, or its end."""
        from irpe.ablation.cells import CellResult

        if event.result is None:
            self.shown[event.work] = f"{100 * event.done / max(event.total, 1):.0f} %"
            self.remaining = event.values.get("remaining")
            if time.monotonic() - self.drawn > _PAUSE:
                self._draw()
            return
        self.ended += 1
        if isinstance(event.result, CellResult):
            first, *moved = (score.value for score in event.result.scores)
            self.shown[event.work] = f"[bold]{first:.1f}[/bold]"
            line = f"{event.work}: {event.result.scores[0].measure.name} {first:.1f}"
            pairs = zip(event.result.shifts[1:], moved, strict=True)
            by = ", by ".join(f"{shift} {value:.1f}" for shift, value in pairs)
            line += f", moved by {by}" if by else ""
        else:
            self.shown[event.work] = "[red]failed[/red]"
            line = str(event.result)
        self._draw()
        if not self.console.is_terminal:
            count = f"[{self.ended}/{len(self.cells)}]"
            self.console.print(f"{count} {line}{self._left()}", markup=False, soft_wrap=True)

    def _left(self) -> str:
        if not self.remaining or self.ended == len(self.cells):
            return ""
        minutes, seconds = divmod(round(self.remaining), 60)
        return f" (about {minutes}:{seconds:02} left)"

    def _draw(self) -> None:
        if not self.console.is_terminal:
            return
        self.drawn = time.monotonic()
        seeds = sorted({cell.config.seed for cell in self.cells})
        table = Table("", *(f"seed {seed}" for seed in seeds), box=None, title=self.title)
        for row in dict.fromkeys(cell.row.name for cell in self.cells):
            names = [cell.name for cell in self.cells if cell.row.name == row]
            table.add_row(row, *(self.shown.get(name, "") for name in names))
        state = f"{self.ended} of {len(self.cells)} cells done{self._left()}"
        self.live.update(Group(table, state), refresh=True)
