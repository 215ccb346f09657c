"""`irpe ablate`: which encoding helps on these images, and at what cost."""

import sys
from collections.abc import Sequence
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
from irpe.train.config import ClassifierConfig, RunConfig

EPILOG = """
**Examples**

`irpe ablate` (six rows, two seeds, the embedded images; minutes on a laptop)

`irpe ablate --data FOLDER --seeds 3` (your images, with the budget of the recipe laptop_64)

`irpe ablate --table 4 --grid 14` (the rows of the paper's Table 4 on 14 x 14 patches)

`irpe ablate --row K=product-contextual-k --row shaw=shaw` (rows of your own)

Stopped at any moment, the same command goes on where it was: finished cells are kept.
"""


@with_fields(ClassifierConfig, without=("encoding", "absolute", "seed"))
def ablate(
    recipe: Annotated[
        str | None,
        typer.Option(help="The budget of every cell [laptop; with --data laptop_64]."),
    ] = None,
    table: Annotated[
        int | None, typer.Option(help="Rows of the paper's Table 1, 2, 3 or 4.")
    ] = None,
    buckets: Annotated[bool, typer.Option("--buckets", help="Rows of the paper's Fig. 3.")] = False,
    row: Annotated[
        list[str] | None, typer.Option(help="NAME=ENCODING[,ABSOLUTE]: a row of your own.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each row.")] = 2,
    grid: Annotated[int, typer.Option(help="Patches along a side; 0: the recipe's.")] = 0,
    output: Annotated[Path, typer.Option("--output", "-o", help="Runs and report.")] = Path(
        "runs/ablation"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    changes: dict[str, Any] | None = None,
) -> None:
    """Compare encodings on your images: equal budget, several seeds, a report in plain words."""
    require("accelerate", "train")
    require("timm", "train")
    require("matplotlib", "viz")
    from irpe.ablation.cells import measure_costs, plan, run_cells
    from irpe.ablation.report import make_lines, sentences, write_report
    from irpe.train.classification.sources import open_images
    from irpe.train.engine import StoppedError

    given = changes or {}
    recipe = recipe or ("laptop_64" if "data" in given else "laptop")
    base = _with_grid(find_recipe(recipe, RECIPES).replace(**given), grid)
    title, rows = _choose_rows(table, buckets, row or [])
    data = open_images(base.data, base.root, base.holdout)
    cells = plan(rows, base, seeds, data, output)
    console = Console(stderr=True, highlight=False)
    try:
        with LiveTable(cells, console) as live:
            results = run_cells(cells, data, live)
    except StoppedError as stop:
        typer.echo(f"{stop}; the same command goes on from there", err=True)
        sys.exit(STOPPED)
    with console.status("measuring what the rows cost"):
        lines = make_lines(results, measure_costs(cells, len(data[0].classes)))
    write_report(output / "report", title, lines, cells)
    if as_json:
        typer.echo((output / "report" / "results.json").read_text())
        return
    screen = Console(highlight=False, markup=False)
    screen.print(_final_table(lines))
    for sentence in sentences(lines):
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
        self.found: dict[tuple[str, int], str] = {}
        self.progress = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(), console=console,
        )  # fmt: skip
        self.all = self.progress.add_task("all cells", total=len(cells))
        self.bar = self.progress.add_task("this cell", total=1)
        self.is_live = console.is_terminal
        self.live = Live(console=console, refresh_per_second=4)
        self.steps, self.finished = 1, 0

    def __enter__(self) -> "LiveTable":
        if self.is_live:
            self.live.start()
            self._show()
        return self

    def __exit__(self, *error: object) -> None:
        if self.is_live:
            self._show()
            self.live.stop()

    def begin(self, cell: Any) -> "LiveTable":
        """A cell begins."""
        self.progress.reset(self.bar, description=cell.row.name)
        self.found[cell.row.name, cell.config.seed] = "..."
        self._show()
        return self

    def end(self, cell: Any, result: Any) -> None:
        """A cell has ended."""
        self.finished += 1
        self.found[cell.row.name, cell.config.seed] = f"{result.top1():.1f}"
        self.progress.update(self.all, completed=self.finished)
        self._show()
        if not self.is_live:
            self.console.print(
                f"[{self.finished}/{len(self.cells)}] {cell.row.name}, seed {cell.config.seed}: "
                f"top-1 {result.top1():.1f}, moved by 1 {result.top1(1):.1f}, by 2 "
                f"{result.top1(2):.1f}",
                markup=False,
            )

    def start(self, config: RunConfig, steps: int, done: int) -> None:
        """A run begins."""
        self.steps = steps * config.epochs

    def step(self, done: int, loss: float, num_images: int) -> None:
        """A step of a run is done."""
        part = done / self.steps
        self.progress.update(self.bar, completed=part)
        self.progress.update(self.all, completed=self.finished + part)

    def epoch(self, row: dict[str, float]) -> None:
        """An epoch of a run is done."""

    def _show(self) -> None:
        if not self.is_live:
            return
        seeds = sorted({cell.config.seed for cell in self.cells})
        table = Table("", *(f"seed {seed}" for seed in seeds), box=None, title="top-1 (%)")
        for name in dict.fromkeys(cell.row.name for cell in self.cells):
            table.add_row(name, *(self.found.get((name, seed), "") for seed in seeds))
        self.live.update(Group(table, self.progress))


def _choose_rows(table: int | None, buckets: bool, own: list[str]) -> tuple[str, list[Any]]:
    from irpe.ablation.rows import TABLES, default_rows
    from irpe.ablation.rows import buckets as bucket_rows

    if sum([table is not None, buckets, bool(own)]) > 1:
        raise ValueError("--table, --buckets and --row exclude one another")
    if own:
        return "Ablation", [_parse_row(text) for text in own]
    if buckets:
        return "Number of buckets (the paper's Fig. 3)", bucket_rows()
    if table is None:
        return "Ablation", default_rows()
    if table not in TABLES:
        raise ValueError(f"--table {table} is not one of {', '.join(map(str, TABLES))}")
    return f"The rows of the paper's Table {table}", TABLES[table]()


def _parse_row(text: str) -> Any:
    from irpe.ablation.cells import Row

    name, equals, rest = text.partition("=")
    encoding, _, absolute = rest.partition(",")
    if not (name and equals and encoding):
        raise ValueError(f"--row {text!r} is not of the form NAME=ENCODING[,keep|none|sinusoid]")
    return Row(name, encoding, absolute or "none")


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


def _final_table(lines: Sequence[Any]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("", "top-1", "moved 1", "moved 2", "parameters", "MACs", "step"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    cheapest = min(line.cost.step for line in lines)
    for line in lines:
        scores = [f"{line.mean(m):.1f}±{line.spread(m):.1f}" for m in range(3)]
        cost = line.cost
        table.add_row(
            line.row, *scores, f"{cost.parameters:,}", f"{cost.macs / 1e6:.1f}M",
            f"{cost.step / cheapest:.2f}x",
        )  # fmt: skip
    return table
