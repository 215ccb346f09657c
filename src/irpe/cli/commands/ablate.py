"""`irpe ablate`: which encoding helps on these images, and at what cost."""

import sys
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from irpe.cli.parse import SETTINGS, change_config, wrap
from irpe.errors import UserError, check_choice
from irpe.extras import require_installed
from irpe.progress import Event, Listener, silent
from irpe.recipes import classification, segmentation
from irpe.train.config import RunConfig

if TYPE_CHECKING:
    from irpe.ablation.report import AblationReport

RECIPES = {**classification.RECIPES, **segmentation.RECIPES}
OFFERED = tuple(name for name in SETTINGS if name not in ("encoding", "absolute", "seed"))
LEGEND_ON_SCREEN = (
    "{} (%): mean ± half the range of the seeds (standard error over the images); effect: how "
    "much the attention's output changes without the encoding; step: time of a training step"
)


def ablate(
    folders: Annotated[
        list[Path] | None, "Only print the report of these folders.", "FOLDER"
    ] = None,
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
    cluster: Annotated[
        str | None, "Run on a cluster: slurm, or dask:ADDRESS [this machine].", "CLUSTER"
    ] = None,
    slurm: Annotated[
        str | None,
        "Of SLURM jobs: partition=gpu,gpus_per_node=1,timeout_min=120.",
        "NAME=VALUE,...",
    ] = None,
    resubmit: Annotated[
        bool, "Submit SLURM jobs again that failed, were cancelled or timed out."
    ] = False,
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
        irpe ablate --data FOLDER --cluster slurm --slurm partition=gpu
        irpe ablate runs/ablation-FOLDER-default    # the report again, or so far
    """
    require_installed("train", "accelerate", "timm")
    require_installed("viz", "matplotlib")
    if folders:
        from irpe.ablation.folder import find_claim

        for folder in folders:
            find_claim(folder)
        from irpe.ablation import read_report

        _show(read_report(*folders), as_json)
        return
    from irpe.ablation.folder import default_folder
    from irpe.ablation.rows import check_rows, choose_rows, has_directions

    given = changes or {}
    assert config is not None
    chosen, notes = change_config(config, given)
    base = _with_grid(chosen, grid)
    if tune and (searched := {"table_lr", "absolute_lr"} & given.keys()):
        raise UserError(f"--tune cannot be combined with {min(searched)}: it searches this rate")
    _, *sides = base.input_shape or (3, 224, 224)
    side = max(1, max(sides) // int(base.model_args.get("patch_size", 16)))
    title, short, rows = choose_rows(table, row or [], side)
    check_rows(rows, seeds)
    parameters = _parameters(slurm, cluster)
    if jobs is not None and jobs < 1:
        raise UserError(f"jobs = {jobs} must be at least 1")
    if "flip" not in given and getattr(base, "flip", 0.0) and has_directions(rows):
        base = base.replace(flip=0.0)
        notes.append("images are not mirrored, as rows tell left from right (--set flip=0.5 does)")
    recipe = recipe or _default(given)
    names = ", ".join(each.name for each in rows)
    seeds_of = f"{seeds} seed{'s' * (seeds > 1)} each"
    print(f"comparing {names}, {seeds_of} ({recipe}, {base.data})", file=sys.stderr, flush=True)
    base.check_data()
    from irpe.ablation import Ablation, parse_cluster
    from irpe.ablation import ablate as run
    from irpe.train.processes import StoppedError

    folder = output or default_folder(base.data, f"{short}-tuned" if tune else short)
    ablation = Ablation(rows, base, folder, seeds, tune, title, recipe)
    executor = parse_cluster(cluster, parameters, resubmit) if cluster else None
    try:
        with _Screen(notes) as screen, executor or nullcontext():
            report = run(ablation, executor, jobs, screen)
    except StoppedError as stop:
        print(f"{stop}; the same command goes on from there", file=sys.stderr)
        sys.exit(128 + stop.number)
    _show(report, as_json)
    if not as_json:
        print(f"Report: {folder / 'report' / 'report.md'}")
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
        self.stack = ExitStack()
        self.table: Listener = silent

    def __enter__(self) -> "_Screen":
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def __call__(self, event: Event) -> None:
        """Shows an event: what will run, the table of the cells, or what happens in it."""
        from irpe.cli.ablation_table import LiveTable
        from irpe.cli.console import facts_of

        if event.work == "facts":
            facts: Any = event.result
            notes = (line for note in self.notes for line in wrap(note))
            for each in (*facts_of(facts), *notes):
                self.console.print(each, markup=False, soft_wrap=True)
        elif event.work == "costs":
            self.stack.enter_context(self.console.status("measuring what the rows cost"))
        elif event.work == "cells":
            self.stack.close()
            group: Any = event.result
            self.table = self.stack.enter_context(LiveTable(group.cells, self.console, group.title))
        else:
            self.table(event)


def _parameters(text: str | None, cluster: str | None) -> dict[str, str]:
    """Returns the parameters of SLURM jobs in a text."""
    if text and not cluster:
        raise UserError(f"--slurm {text} needs --cluster slurm")
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    if wrong := [name for name, equals, value in pairs if not (equals and value)]:
        raise UserError(f"--slurm {text!r}: {wrong[0]!r} is not of the form NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _show(report: "AblationReport", as_json: bool) -> None:
    from irpe.ablation.report import effect_text
    from irpe.cli.console import print_json, print_lines, print_table

    if as_json:
        print_json(report.as_json())
        return
    rows, first = report.rows, report.rows[0]
    moved = [f"moved {shift}" for shift in first.shifts[1:]]
    cheapest = min(row.cost.step for row in rows)
    cells = [
        [row.name, *(row.text(shift) for shift in row.shifts), effect_text(row),
         f"{row.cost.step / cheapest:.2f}x"]
        for row in rows
    ]  # fmt: skip
    print_table(("", first.measure.name, *moved, "effect", "step"), cells)
    legend = wrap(LEGEND_ON_SCREEN.format(first.measure.name))
    print_lines(*legend, *(each for line in report.lines() for each in _item(line)))


def _item(line: str) -> list[str]:
    """Returns a line of the answer; a command stays whole, so that it can be pasted."""
    return [f"- {line}"] if line.startswith("Next: irpe ") else wrap(line, "- ", "  ")


def _with_grid(config: Any, grid: int | None) -> RunConfig:
    if grid is None:
        return config
    if not hasattr(config, "image_size"):
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
