"""`irpe ablate`: which encoding helps on these images, and at what cost."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from irpe.cli.fields import change_config, with_fields
from irpe.cli.formats import format_facts
from irpe.cli.train import find_recipe
from irpe.extras import require
from irpe.recipes import classification, segmentation
from irpe.train.classification.config import ClassifierConfig
from irpe.train.segmentation.config import SegmenterConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from irpe.ablation.cells import AblationConfig, Cell
    from irpe.ablation.planning import RunPlan
    from irpe.ablation.report import AblationReport
    from irpe.ablation.rows import AblationRow
    from irpe.ablation.running import Outcome
    from irpe.ablation.statistics import RowResult

RECIPES = {**classification.RECIPES, **segmentation.RECIPES}
LEGEND_ON_SCREEN = (
    "{} (%): mean ± half the range of the seeds (standard error over the images); effect: how "
    "much of the attention the encoding is; step: time of a training step"
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
def ablate(
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
    changes: dict[str, Any] | None = None,
) -> None:
    """Compare encodings on your images: equal budget, several seeds, an answer in plain words."""
    require("accelerate", "train")
    require("timm", "train")
    require("matplotlib", "viz")
    from irpe.ablation.folder import default_folder

    given = changes or {}
    recipe = recipe or ("laptop_64" if "data" in given else "laptop")
    chosen, notes = change_config(find_recipe(recipe, RECIPES), given)
    base = _with_grid(chosen, grid).with_absolute_paths()
    if tune and (searched := {"table_lr", "absolute_lr"} & given.keys()):
        name = min(searched).replace("_", "-")
        raise ValueError(f"--tune cannot be combined with --{name}: it searches this rate")
    title, short, rows = _choose_rows(table, buckets, row or [], base)
    folder = output or default_folder(base.data, f"{short}-tuned" if tune else short)
    ablation = _Ablation(title, recipe, rows, base, seeds, folder, tune, notes)
    report = _run(ablation, jobs)
    report.write(folder / "report")
    if as_json:
        typer.echo((folder / "report" / "results.json").read_text())
    else:
        _show(report, folder)
    if report.failures:
        sys.exit(1)


@dataclass(frozen=True)
class _Ablation:
    """What the command line asks for."""

    title: str
    recipe: str
    rows: list["AblationRow"]
    base: "AblationConfig"
    seeds: int
    folder: Path
    is_tuned: bool
    notes: list[str]


def _run(ablation: _Ablation, jobs: int | None) -> "AblationReport":
    """Runs the cells, measures what they cost, and returns the report."""
    from irpe.ablation.cells import plan_cells
    from irpe.ablation.costs import measure_row_costs, tasks_of_rows
    from irpe.ablation.folder import claim_folder
    from irpe.ablation.planning import plan_runs
    from irpe.ablation.report import AblationReport
    from irpe.ablation.results import MEASURES
    from irpe.ablation.statistics import collect_rows
    from irpe.ablation.tuning import choose_rates, collect_searches, plan_searches, plan_trials
    from irpe.cli.bars import ProgressBar
    from irpe.train.locks import lock_run
    from irpe.train.task import open_task

    rows, base, folder = ablation.rows, ablation.base, ablation.folder
    console = Console(stderr=True, highlight=False)
    with ProgressBar() as bar:
        task: Any = open_task(base, bar, None)
    cells = plan_cells(rows, base, ablation.seeds, folder)
    searches = plan_searches(rows, base) if ablation.is_tuned else []
    trials = plan_trials(searches, base, folder)
    plan = plan_runs(cells, task, jobs, trials)
    claim_folder(folder, rows, base, (task.train, task.val), ablation.is_tuned)
    score = MEASURES[base.task].name
    for line in (*format_facts({**plan.facts, "output": str(folder)}), *ablation.notes):
        console.print(line, markup=False, soft_wrap=True)
    with lock_run(folder):
        tried = _run_shown(
            trials, plan, f"search: {score} on held-out training images (%)", console
        )
        searched = collect_searches(searches, tried.results)
        rows = choose_rates(rows, searched)
        cells = plan_cells(rows, base, ablation.seeds, folder)
        outcome = _run_shown(cells, plan, f"{score} (%)", console)
        if not outcome.results:
            raise RuntimeError(f"all cells failed: {outcome.failures[0]}")
        with console.status("measuring what the rows cost"):
            costs = measure_row_costs(tasks_of_rows(cells, task))
    found = collect_rows(rows, outcome.results, costs)
    failures = [str(failure) for failure in (*tried.failures, *outcome.failures)]
    return AblationReport(
        ablation.title, ablation.recipe, found, cells, plan.facts, failures, searched
    )


def _run_shown(cells: "Sequence[Cell]", plan: "RunPlan", title: str, console: Console) -> "Outcome":
    """Runs cells while a table shows how they go; a request to stop ends the program."""
    from irpe.ablation.running import Outcome, run_cells
    from irpe.cli.ablation_table import LiveTable
    from irpe.train.signals import StoppedError

    if not cells:
        return Outcome()
    try:
        with LiveTable(cells, console, title) as live:
            return run_cells(cells, plan.jobs, plan.devices, live)
    except StoppedError as stop:
        typer.echo(f"{stop}; the same command goes on from there", err=True)
        sys.exit(128 + stop.number)


def _show(report: "AblationReport", folder: Path) -> None:
    screen = Console(highlight=False, markup=False)
    screen.print(_final_table(report.rows))
    legend = LEGEND_ON_SCREEN.format(report.rows[0].measure.name)
    for line in (legend, *(f"- {line}" for line in report.answer())):
        screen.print(line)
    screen.print(f"Report: {folder / 'report' / 'report.md'}", soft_wrap=True)


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
        raise ValueError("--table, --buckets and --row cannot be combined")
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
        raise ValueError(
            f"--grid {grid} is for square images of classifiers: give a segmenter a patch_size in "
            "--model-args"
        )
    patch, rest = divmod(config.image_size, grid)
    if grid < 1 or rest:
        raise ValueError(
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
