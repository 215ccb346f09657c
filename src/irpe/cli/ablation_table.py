"""The table of an ablation while it runs; where there is no terminal, a line for each cell."""

import time
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from irpe.ablation.cells import Cell
    from irpe.ablation.results import CellResult
    from irpe.ablation.running import Failure

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

    def start(self, cell: "Cell") -> None:
        """A cell begins."""
        self.shown[cell.name] = "..."
        self._draw()

    def step(self, cell: "Cell", fraction: float, remaining: float | None) -> None:
        """A step of a cell is done."""
        self.shown[cell.name] = f"{100 * fraction:.0f} %"
        self.remaining = remaining
        if time.monotonic() - self.drawn > _PAUSE:
            self._draw()

    def end(self, cell: "Cell", found: "CellResult | Failure") -> None:
        """A cell has ended."""
        from irpe.ablation.running import Failure

        self.ended += 1
        if not isinstance(found, Failure):
            self.shown[cell.name] = f"[bold]{found.score():.1f}[/bold]"
            shifts = found.measure.shifts[1:]
            moved = ", by ".join(f"{shift} {found.score(shift):.1f}" for shift in shifts)
            line = f"{cell.name}: {found.measure.name} {found.score():.1f}"
            line += f", moved by {moved}" if shifts else ""
        else:
            self.shown[cell.name] = "[red]failed[/red]"
            line = str(found)
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
