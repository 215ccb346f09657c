"""`irpe ablate`: which encoding helps on these images, and at what cost."""

import json
import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from irpe.cli.ablation_table import LiveTable
from irpe.cli.fields import change_config, with_fields
from irpe.cli.formats import format_facts, wrap
from irpe.cli.train import find_recipe
from irpe.errors import UserError
from irpe.extras import require_installed
from irpe.progress import Event, silent
from irpe.recipes import classification, segmentation
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.segment.config import SegmenterConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from irpe.ablation.cells import AblationConfig
    from irpe.ablation.report import AblationReport
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
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FOLDER]...", help="Print the report of these folders again."),
    ] = None,
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
    cluster: Annotated[
        str | None,
        typer.Option(help="Run on a cluster: slurm, or dask:ADDRESS [this machine]."),
    ] = None,
    slurm: Annotated[
        str,
        typer.Option(help="Of SLURM jobs: partition=gpu,gpus_per_node=1,timeout_min=120."),
    ] = "",
    resubmit: Annotated[
        bool,
        typer.Option("--resubmit", help="Submit again what failed, was cancelled or timed out."),
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

    if folders:
        from irpe.ablation import read_report

        report = read_report(*folders)
        if as_json:
            typer.echo(json.dumps(report.as_json(), indent=2))
        else:
            _show(report)
        return
    given = changes or {}
    recipe = recipe or ("laptop_64" if "data" in given else "laptop")
    chosen, notes = change_config(find_recipe(recipe, RECIPES), given)
    base = _with_grid(chosen, grid)
    if tune and (searched := {"table_lr", "absolute_lr"} & given.keys()):
        name = min(searched).replace("_", "-")
        raise UserError(f"--tune cannot be combined with --{name}: it searches this rate")
    check_data(base)
    from irpe.ablation import Ablation, ablate, parse_cluster
    from irpe.ablation.folder import default_folder
    from irpe.ablation.rows import choose_rows, has_directions
    from irpe.train.signals import StoppedError

    if buckets and table is not None:
        raise UserError("--table and --buckets cannot be combined")
    side = max(1, max(base.input_shape[1:]) // int(base.model_args.get("patch_size", 16)))
    title, short, rows = choose_rows("buckets" if buckets else table, row or [], side)
    if "flip" not in given and getattr(base, "flip", 0.0) and has_directions(rows):
        base = base.replace(flip=0.0)
        notes.append("images are not mirrored, as rows tell left from right (--flip 0.5 does)")
    folder = output or default_folder(base.data, f"{short}-tuned" if tune else short)
    ablation = Ablation(rows, base, folder, seeds, tune, title, recipe)
    executor = None
    if cluster is not None:
        executor = parse_cluster(cluster, _parameters(slurm), resubmit)
    try:
        with _Screen(notes) as screen, executor or nullcontext():
            report = ablate(ablation, executor, jobs, screen)
    except StoppedError as stop:
        typer.echo(f"{stop}; the same command goes on from there", err=True)
        sys.exit(128 + stop.number)
    if as_json:
        typer.echo((folder / "report" / "results.json").read_text())
    else:
        _show(report)
        typer.echo(f"Report: {folder / 'report' / 'report.md'}")
    if report.failures:
        sys.exit(1)


class _Screen:
    """Shows how an ablation goes, on standard error.

    Args:
        notes: What to say after the facts.
    """

    def __init__(self, notes: list[str]) -> None:
        self.console, self.notes = Console(stderr=True, highlight=False), notes
        self.stack, self.table = ExitStack(), silent

    def __enter__(self) -> "_Screen":
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def __call__(self, event: Event) -> None:
        """Shows an event: what will run, the table of the cells, or what happens in it."""
        if event.work == "facts":
            facts: Any = event.result
            notes = (line for note in self.notes for line in wrap(note))
            for each in (*format_facts(facts), *notes):
                self.console.print(each, markup=False, soft_wrap=True)
        elif event.work == "costs":
            self.stack.enter_context(self.console.status("measuring what the rows cost"))
        elif event.work == "cells":
            self.stack.close()
            group: Any = event.result
            self.table = LiveTable(group.cells, self.console, group.title)
            self.stack.enter_context(self.table)
        else:
            self.table(event)


def _parameters(text: str) -> dict[str, str]:
    """Returns the parameters of SLURM jobs in a text."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    if wrong := [name for name, equals, value in pairs if not (equals and value)]:
        raise UserError(f"--slurm {text!r}: {wrong[0]!r} is not of the form NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _show(report: "AblationReport") -> None:
    screen = Console(highlight=False, markup=False)
    screen.print(_final_table(report.rows))
    legend = LEGEND_ON_SCREEN.format(report.rows[0].measure.name)
    answer = (part for sentence in report.lines() for part in _item(sentence))
    for line in (*wrap(legend), *answer):
        screen.print(line, soft_wrap=True)


def _item(line: str) -> list[str]:
    """Returns a line of the answer; a command stays whole, so that it can be pasted."""
    return [f"- {line}"] if line.startswith("Next: irpe ") else wrap(line, "- ", "  ")


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
    moved = [f"moved {shift}" for shift in rows[0].shifts[1:]]
    for name in ("", rows[0].measure.name, *moved, "effect", "step"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    cheapest = min(row.cost.step for row in rows)
    for row in rows:
        scores = [row.text(shift) for shift in row.shifts]
        table.add_row(row.name, *scores, effect_text(row), f"{row.cost.step / cheapest:.2f}x")
    return table
