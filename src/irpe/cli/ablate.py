"""`irpe ablate`: which encoding helps on these images, and at what cost."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.status import Status
from rich.table import Table

from irpe.cli.ablation_table import LiveTable
from irpe.cli.bars import ProgressBar
from irpe.cli.fields import change_config, with_fields
from irpe.cli.formats import format_facts, wrap
from irpe.cli.train import find_recipe
from irpe.errors import UserError
from irpe.extras import require_installed
from irpe.recipes import classification, segmentation
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.segment.config import SegmenterConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from irpe.ablation.cells import AblationConfig, Cell
    from irpe.ablation.report import AblationReport
    from irpe.ablation.rows import AblationRow
    from irpe.ablation.statistics import RowResult

RECIPES = {**classification.RECIPES, **segmentation.RECIPES}
LEGEND_ON_SCREEN = (
    "{} (%): mean ± half the range of the seeds (standard error over the images); effect: how "
    "much the attention's output changes without the encoding; step: time of a training step"
)

EPILOG = """
**Examples**

`irpe ablate` (six rows, two seeds, the embedded images; 3 minutes on 2 cores)

`irpe ablate --data FOLDER --seeds 3` (your images, with the budget of the recipe laptop_64)

`irpe ablate --table 4 --grid 14` (the rows of the paper's Table 4 on 14 x 14 patches)

`irpe ablate --table modern --tune --data FOLDER` (rotary or relative?)

`irpe ablate --row K=product-contextual-k --row shaw=shaw` (rows of your own)

`irpe ablate --recipe seg_small --data FOLDER --ignore-label 11` (segmentation, by mIoU)

Stop at any moment: the same command continues, and finished runs are not repeated.
"""


@with_fields(ClassifierConfig, SegmenterConfig, without=("encoding", "absolute", "seed"))
def compare(
    recipe: Annotated[
        str | None,
        typer.Option(help="The recipe that every run trains [laptop; with --data laptop_64]."),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            help="Compare the encodings of the paper's Table 1, 2, 3 or 4; or 'modern': rotary, "
            "decomposed and continuous encodings beside the paper's."
        ),
    ] = None,
    buckets: Annotated[
        bool, typer.Option("--buckets", help="Compare numbers of buckets (Fig. 3).")
    ] = False,
    row: Annotated[
        list[str] | None,
        typer.Option(help="Compare encodings of your own: NAME=ENCODING[,ABSOLUTE]; repeat it."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each encoding, with different seeds.")] = 2,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="First search the best learning rate of each encoding's tables, on held-out "
            "training images.",
        ),
    ] = False,
    grid: Annotated[int, typer.Option(help="Patches along a side; 0: as in the recipe.")] = 0,
    jobs: Annotated[
        int | None,
        typer.Option(help="Runs at a time, one thread each [as cores and memory, or GPUs, allow]."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Folder of the runs and the report [runs/ablation-DATA-ROWS]."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    encoding: Annotated[str | None, typer.Option(hidden=True)] = None,
    changes: dict[str, Any] | None = None,
) -> None:
    """Compare encodings on your images: equal budget, several seeds, an answer in plain words."""
    if encoding is not None:  # an option of irpe train
        raise UserError(
            f"--encoding {encoding}: irpe ablate compares rows, each with an encoding; write --row "
            f"NAME=ENCODING for each, as in --row mine={encoding} --row absolute=none,keep"
        )
    require_installed("train", "accelerate", "timm")
    require_installed("viz", "matplotlib")
    from irpe.train.data_check import check_data

    given = changes or {}
    recipe = recipe or ("laptop_64" if "data" in given else "laptop")
    chosen, notes = change_config(find_recipe(recipe, RECIPES), given)
    base = _with_grid(chosen, grid)
    if tune and (searched := {"table_lr", "absolute_lr"} & given.keys()):
        name = min(searched).replace("_", "-")
        raise UserError(f"--tune cannot be combined with --{name}: it searches this rate")
    check_data(base)
    from irpe.ablation import Ablation, ablate
    from irpe.ablation.folder import default_folder
    from irpe.train.signals import StoppedError

    title, short, rows = _choose_rows(table, buckets, row or [], base)
    folder = output or default_folder(base.data, f"{short}-tuned" if tune else short)
    ablation = Ablation(rows, base, folder, seeds, tune, title, recipe)
    try:
        report = ablate(ablation, jobs, _Screen(notes))
    except StoppedError as stop:
        typer.echo(f"{stop}; the same command goes on from there", err=True)
        sys.exit(128 + stop.number)
    if as_json:
        typer.echo((folder / "report" / "results.json").read_text())
    else:
        _show(report, folder)
    if report.failures:
        sys.exit(1)


class _Screen:
    """Shows how an ablation goes, on standard error.

    Args:
        notes: What to say after the facts.
    """

    def __init__(self, notes: list[str]) -> None:
        self.console, self.notes = Console(stderr=True, highlight=False), notes

    def progress(self) -> ProgressBar:
        """Shows how the data are opened."""
        return ProgressBar()

    def begin(self, facts: dict[str, str]) -> None:
        """Prints what will run."""
        for line in (*format_facts(facts), *(each for note in self.notes for each in wrap(note))):
            self.console.print(line, markup=False, soft_wrap=True)

    def board(self, cells: "Sequence[Cell]", title: str) -> LiveTable:
        """Returns a table that shows the cells."""
        return LiveTable(cells, self.console, title)

    def measuring(self) -> Status:
        """Says that the costs are measured."""
        return self.console.status("measuring what the rows cost")


def _show(report: "AblationReport", folder: Path) -> None:
    screen = Console(highlight=False, markup=False)
    screen.print(_final_table(report.rows))
    legend = LEGEND_ON_SCREEN.format(report.rows[0].measure.name)
    lines = [*wrap(legend), *(each for line in report.answer() for each in _item(line))]
    for line in (*lines, f"Report: {folder / 'report' / 'report.md'}"):
        screen.print(line, soft_wrap=True)


def _item(line: str) -> list[str]:
    """Returns a line of the answer; a command stays whole, so that it can be pasted."""
    return [f"- {line}"] if line.startswith("Next: irpe ") else wrap(line, "- ", "  ")


def _choose_rows(
    table: str | None, buckets: bool, own: list[str], base: "AblationConfig"
) -> tuple[str, str, list["AblationRow"]]:
    """Returns a title, a short name, and the rows."""
    from irpe.ablation.rows import (
        MODERN,
        bucket_rows,
        default_rows,
        modern_rows,
        parse_row,
        table_rows,
    )

    if sum([table is not None, buckets, bool(own)]) > 1:
        raise UserError("--table, --buckets and --row cannot be combined")
    if own:
        rows = [parse_row(text) for text in own]
        return "Ablation", "-".join(row.name for row in rows), rows
    if buckets:
        return "Number of buckets (the paper's Fig. 3)", "buckets", bucket_rows()
    if table is None:
        return "Ablation", "default", default_rows()
    if table == MODERN:
        side = max(1, max(base.input_shape[1:]) // int(base.model_args.get("patch_size", 16)))
        return "Encodings of today's backbones", MODERN, modern_rows(side)
    return f"The rows of the paper's Table {table}", f"table-{table}", table_rows(table)


def _with_grid(config: "AblationConfig", grid: int) -> "AblationConfig":
    if not grid:
        return config
    if isinstance(config, SegmenterConfig):
        raise UserError(
            f"--grid {grid} is for square images of classifiers: give a segmenter a patch_size in "
            "--model-args"
        )
    patch, rest = divmod(config.image_size, grid)
    if grid < 1 or rest:
        raise UserError(
            f"--grid {grid} does not divide the image of {config.image_size} pixels: choose a "
            "divisor, or another --image-size"
        )
    return config.replace(model_args={**config.model_args, "patch_size": patch})


def _final_table(rows: "Sequence[RowResult]") -> Table:
    from irpe.ablation.report import effect_text

    table = Table(box=None, pad_edge=False)
    measure = rows[0].measure
    moved = [f"moved {shift}" for shift in measure.shifts[1:]]
    for name in ("", measure.name, *moved, "effect", "step"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    cheapest = min(row.cost.step for row in rows)
    for row in rows:
        scores = [row.text(shift) for shift in measure.shifts]
        table.add_row(row.name, *scores, effect_text(row), f"{row.cost.step / cheapest:.2f}x")
    return table
