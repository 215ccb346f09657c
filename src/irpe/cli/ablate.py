"""`irpe ablate`: which encoding helps on these images, and at what cost."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from irpe.cli.fields import with_fields
from irpe.cli.train import STOPPED, find_recipe
from irpe.extras import require
from irpe.recipes.classification import RECIPES
from irpe.train.classification.config import ClassifierConfig

EPILOG = """
**Examples**

`irpe ablate` (six rows, two seeds, the embedded images; minutes on a laptop)

`irpe ablate --data FOLDER --seeds 3` (your images, with the budget of the recipe laptop_64)

`irpe ablate --table 4 --grid 14` (the rows of the paper's Table 4 on 14 x 14 patches)

`irpe ablate --row K=product-contextual-k --row shaw=shaw` (rows of your own)

Stop at any moment: the same command continues, and finished runs are not repeated.
"""


@with_fields(ClassifierConfig, without=("encoding", "absolute", "seed"))
def ablate(
    recipe: Annotated[
        str | None,
        typer.Option(help="The recipe that every run trains [laptop; with --data laptop_64]."),
    ] = None,
    table: Annotated[
        int | None, typer.Option(help="Compare the encodings of the paper's Table 1, 2, 3 or 4.")
    ] = None,
    buckets: Annotated[
        bool, typer.Option("--buckets", help="Compare numbers of buckets (Fig. 3).")
    ] = False,
    row: Annotated[
        list[str] | None,
        typer.Option(help="Compare encodings of your own: NAME=ENCODING[,ABSOLUTE]; repeat it."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each encoding, with different seeds.")] = 2,
    grid: Annotated[int, typer.Option(help="Patches along a side; 0: as in the recipe.")] = 0,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder of the runs and the report.")
    ] = Path("runs/ablation"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    changes: dict[str, Any] | None = None,
) -> None:
    """Compare encodings on your images: equal budget, several seeds, a report in plain words."""
    require("accelerate", "train")
    require("timm", "train")
    require("matplotlib", "viz")
    from irpe.ablation.cells import measure_row_costs, plan_cells, run_cells
    from irpe.ablation.report import sentences, write_report
    from irpe.ablation.statistics import collect_rows
    from irpe.train.classification.sources import open_images
    from irpe.train.signals import StoppedError

    given = changes or {}
    recipe = recipe or ("laptop_64" if "data" in given else "laptop")
    base = _with_grid(find_recipe(recipe, RECIPES).replace(**given), grid)
    title, rows = _choose_rows(table, buckets, row or [])
    data = open_images(base.data, base.root, base.holdout)
    cells = plan_cells(rows, base.with_absolute_paths(), seeds, data, output)
    console = Console(stderr=True, highlight=False)
    try:
        with LiveTable(cells, console) as live:
            results = run_cells(cells, data, live, live.cell)
    except StoppedError as stop:
        typer.echo(f"{stop}; the same command goes on from there", err=True)
        sys.exit(STOPPED)
    with console.status("measuring what the rows cost"):
        found = collect_rows(results, measure_row_costs(cells, len(data[0].classes)))
    write_report(output / "report", title, found, cells)
    if as_json:
        typer.echo((output / "report" / "results.json").read_text())
        return
    screen = Console(highlight=False, markup=False)
    screen.print(_final_table(found))
    for sentence in sentences(found):
        screen.print(f"- {sentence}")
    screen.print(f"Report: {output / 'report' / 'report.md'}", soft_wrap=True)


class LiveTable:
    """The table of an ablation while it runs; where there is no terminal, a line for each cell.

    Args:
        cells: All cells.
        console: Where it is shown.
    """

    def __init__(self, cells: Sequence[Any], console: Console) -> None:
        self.cells, self.console = cells, console
        self.top1: dict[str, str] = {}
        self.bars = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self.all = self.bars.add_task("all cells", total=len(cells))
        self.this = self.bars.add_task("this cell", total=1)
        self.is_live = console.is_terminal
        self.live = Live(console=console, refresh_per_second=4)
        self.done = 0

    def __enter__(self) -> "LiveTable":
        if self.is_live:
            self.live.start()
            self._show()
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_live:
            self._show()
            self.live.stop()

    def cell(self, cell: Any) -> "CellBar":
        """Returns what shows the run of a cell."""
        self.bars.reset(self.this, description=cell.row.name)
        self.top1[cell.name] = "..."
        self._show()
        return CellBar(self)

    def start(self, name: str, total: int, done: int = 0) -> None:
        """The ablation begins."""

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """A cell is done."""
        self.done = done
        self.bars.update(self.all, completed=done)

    def report(self, name: str, values: Mapping[str, float]) -> None:
        """Shows what a cell found."""
        self.top1[name] = f"{values['top1']:.1f}"
        self._show()
        if not self.is_live:
            plain, *shifted = values.values()
            moved = ", by ".join(f"{n} {score:.1f}" for n, score in enumerate(shifted, 1))
            line = f"[{self.done}/{len(self.cells)}] {name}: top-1 {plain:.1f}, moved by {moved}"
            self.console.print(line, markup=False)

    def show_fraction(self, fraction: float) -> None:
        """Shows how much of a cell's run is done."""
        self.bars.update(self.this, completed=fraction)
        self.bars.update(self.all, completed=self.done + fraction)

    def _show(self) -> None:
        if not self.is_live:
            return
        seeds = sorted({cell.config.seed for cell in self.cells})
        table = Table("", *(f"seed {seed}" for seed in seeds), box=None, title="top-1 (%)")
        for row in dict.fromkeys(cell.row.name for cell in self.cells):
            names = [cell.name for cell in self.cells if cell.row.name == row]
            table.add_row(row, *(self.top1.get(name, "") for name in names))
        self.live.update(Group(table, self.bars))


class CellBar:
    """The bar of the cell that runs, in a live table.

    Args:
        table: The table.
    """

    def __init__(self, table: LiveTable) -> None:
        self.table, self.total = table, 1

    def start(self, name: str, total: int, done: int = 0) -> None:
        """The run begins."""
        self.total = total

    def step(self, done: int, values: Mapping[str, float]) -> None:
        """A step of the run is done."""
        self.table.show_fraction(done / self.total)

    def report(self, name: str, values: Mapping[str, float]) -> None:
        """Shows nothing of an epoch."""


def _choose_rows(table: int | None, buckets: bool, own: list[str]) -> tuple[str, list[Any]]:
    from irpe.ablation.rows import bucket_rows, default_rows, parse_row, table_rows

    if sum([table is not None, buckets, bool(own)]) > 1:
        raise ValueError("--table, --buckets and --row cannot be combined")
    if own:
        return "Ablation", [parse_row(text) for text in own]
    if buckets:
        return "Number of buckets (the paper's Fig. 3)", bucket_rows()
    if table is None:
        return "Ablation", default_rows()
    return f"The rows of the paper's Table {table}", table_rows(table)


def _with_grid(config: ClassifierConfig, grid: int) -> ClassifierConfig:
    if not grid:
        return config
    patch, rest = divmod(config.image_size, grid)
    if grid < 1 or rest:
        raise ValueError(
            f"--grid {grid} does not divide the image of {config.image_size} pixels: choose a "
            "divisor, or another --image-size"
        )
    return config.replace(model_args={**config.model_args, "patch_size": patch})


def _final_table(rows: Sequence[Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "top-1", "moved 1", "moved 2", "parameters", "MACs", "step"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    cheapest = min(row.cost.step for row in rows)
    for row in rows:
        scores = [f"{row.mean(s):.1f}±{row.spread(s):.1f}" for s in range(3)]
        cost = row.cost
        table.add_row(
            row.name, *scores, f"{cost.parameters:,}", f"{cost.macs / 1e6:.1f}M",
            f"{cost.step / cheapest:.2f}x",
        )  # fmt: skip
    return table
