"""`irpe ablate`: which encoding helps on these images, and at what cost."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from irpe.cli.parse import SETTINGS, change_config, wrap
from irpe.core.choices import check_choice
from irpe.errors import UserError
from irpe.extras import require_installed
from irpe.recipes import classification, segmentation
from irpe.tasks.segment.config import SegmenterConfig
from irpe.train.config import RunConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.status import Status

    from irpe.ablation.cells import AblationConfig, Cell
    from irpe.ablation.report import AblationReport
    from irpe.ablation.rows import AblationRow
    from irpe.cli.ablation_table import LiveTable
    from irpe.cli.bars import ProgressBar

RECIPES = {**classification.RECIPES, **segmentation.RECIPES}
OFFERED = tuple(name for name in SETTINGS if name not in ("encoding", "absolute", "seed"))
LEGEND_ON_SCREEN = (
    "{} (%): mean ± half the range of the seeds (standard error over the images); effect: how "
    "much the attention's output changes without the encoding; step: time of a training step"
)


def ablate(
    *,
    recipe: Annotated[str | None, "What every run trains [laptop; with --data laptop_64]."] = None,
    table: Annotated[
        str | None,
        "Rows of the paper's Table 1, 2, 3 or 4; of its Fig. 3: buckets; rotary, decomposed and "
        "continuous encodings beside the paper's: modern.",
    ] = None,
    row: Annotated[
        list[str] | None, "A row of your own; repeat it.", "NAME=ENCODING[,ABSOLUTE]"
    ] = None,
    seeds: Annotated[int, "Runs of each row, with different seeds."] = 2,
    tune: Annotated[
        bool, "First search the best rate of each row's tables, on held-out training images."
    ] = False,
    grid: Annotated[int | None, "Patches along a side [as in the recipe]."] = None,
    jobs: Annotated[
        int | None, "Runs at a time, one thread each [as cores and memory, or GPUs, allow]."
    ] = None,
    output: Annotated[
        Path | None, "Folder of the runs and the report [runs/ablation-DATA-ROWS].", "DIR"
    ] = None,
    as_json: Annotated[bool, "Print the results as JSON."] = False,
    config: RunConfig | None = None,
    changes: dict[str, Any] | None = None,
) -> None:
    """Compare encodings on your images: equal budget, several seeds, an answer in plain words.

    Each row is an encoding with an absolute one. Stop at any moment: the same command continues,
    and finished runs are not repeated.

    Examples:
        irpe ablate    # six rows, two seeds, images of our own: 3 minutes on 2 cores
        irpe ablate --data FOLDER --seeds 3
        irpe ablate --table 4 --grid 14
        irpe ablate --table modern --tune --data FOLDER
        irpe ablate --row relative=K --row shaw=shaw --row absolute=none,keep
        irpe ablate --recipe seg_small --data FOLDER --set ignore_label=11
    """
    require_installed("train", "accelerate", "timm")
    require_installed("viz", "matplotlib")
    from irpe.train.data_check import check_data

    given = changes or {}
    assert config is not None
    chosen, notes = change_config(config, given)
    base = _with_grid(chosen, grid)
    if tune and (searched := {"table_lr", "absolute_lr"} & given.keys()):
        raise UserError(f"--tune cannot be combined with {min(searched)}: it searches this rate")
    check_data(base)
    from irpe.ablation import Ablation
    from irpe.ablation import ablate as run
    from irpe.ablation.folder import default_folder
    from irpe.train.signals import StoppedError

    title, short, rows = _choose_rows(table, row or [], base)
    folder = output or default_folder(base.data, f"{short}-tuned" if tune else short)
    ablation = Ablation(rows, base, folder, seeds, tune, title, recipe or _default(given))
    try:
        report = run(ablation, jobs, _Screen(notes))
    except StoppedError as stop:
        print(f"{stop}; the same command goes on from there", file=sys.stderr)
        sys.exit(128 + stop.number)
    if as_json:
        print((folder / "report" / "results.json").read_text())
    else:
        _show(report, folder)
    if report.failures:
        sys.exit(1)


def configure(recipe: str | None, **given: Any) -> tuple[RunConfig, str]:
    """Returns the configuration of a recipe."""
    recipe = recipe or _default(given)
    check_choice("recipe", recipe, RECIPES)
    return RECIPES[recipe](), ""


def _default(given: "dict[str, Any]") -> str:
    """Returns the recipe if none is named: images of a user have colours."""
    return "laptop_64" if "data" in given else "laptop"


class _Screen:
    """Shows how an ablation goes, on standard error.

    Args:
        notes: What to say after the facts.
    """

    def __init__(self, notes: list[str]) -> None:
        from rich.console import Console

        self.console, self.notes = Console(stderr=True, highlight=False), notes

    def progress(self) -> "ProgressBar":
        """Shows how the data are opened."""
        from irpe.cli.bars import ProgressBar

        return ProgressBar()

    def begin(self, facts: dict[str, str]) -> None:
        """Prints what will run."""
        from irpe.cli.console import facts_of

        for line in (*facts_of(facts), *(each for note in self.notes for each in wrap(note))):
            self.console.print(line, markup=False, soft_wrap=True)

    def board(self, cells: "Sequence[Cell]", title: str) -> "LiveTable":
        """Returns a table that shows the cells."""
        from irpe.cli.ablation_table import LiveTable

        return LiveTable(cells, self.console, title)

    def measuring(self) -> "Status":
        """Says that the costs are measured."""
        return self.console.status("measuring what the rows cost")


def _show(report: "AblationReport", folder: Path) -> None:
    from irpe.ablation.report import effect_text
    from irpe.cli.console import print_lines, print_table

    rows, measure = report.rows, report.rows[0].measure
    moved = [f"moved {shift}" for shift in measure.shifts[1:]]
    cheapest = min(row.cost.step for row in rows)
    cells = [
        [row.name, *(row.text(shift) for shift in measure.shifts), effect_text(row),
         f"{row.cost.step / cheapest:.2f}x"]
        for row in rows
    ]  # fmt: skip
    print_table(("", measure.name, *moved, "effect", "step"), cells)
    legend = wrap(LEGEND_ON_SCREEN.format(measure.name))
    print_lines(*legend, *(each for line in report.answer() for each in _item(line)))
    print_lines(f"Report: {folder / 'report' / 'report.md'}")


def _item(line: str) -> list[str]:
    """Returns a line of the answer; a command stays whole, so that it can be pasted."""
    return [f"- {line}"] if line.startswith("Next: irpe ") else wrap(line, "- ", "  ")


def _choose_rows(
    table: str | None, own: list[str], base: Any
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

    if table is not None and own:
        raise UserError("--table and --row cannot be combined")
    if own:
        rows = [parse_row(text) for text in own]
        return "Ablation", "-".join(row.name for row in rows), rows
    if table == "buckets":
        return "Number of buckets (the paper's Fig. 3)", "buckets", bucket_rows()
    if table is None:
        return "Ablation", "default", default_rows()
    if table == MODERN:
        side = max(1, max(base.input_shape[1:]) // int(base.model_args.get("patch_size", 16)))
        return "Encodings of today's backbones", MODERN, modern_rows(side)
    return f"The rows of the paper's Table {table}", f"table-{table}", table_rows(table)


def _with_grid(config: Any, grid: int | None) -> "AblationConfig":
    if grid is None:
        return config
    if isinstance(config, SegmenterConfig):
        raise UserError(
            f"--grid {grid} is for square images of classifiers: give a segmenter a patch_size in "
            "--model-args"
        )
    if grid < 1 or config.image_size % grid:
        raise UserError(
            f"--grid {grid} does not divide the image of {config.image_size} pixels: choose a "
            "divisor, or another --image-size"
        )
    return config.replace(model_args={**config.model_args, "patch_size": config.image_size // grid})
