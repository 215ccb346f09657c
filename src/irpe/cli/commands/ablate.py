"""`irpe ablate`: which encoding helps on these images, and at what cost."""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from irpe.cli.commands.robustness import parse_shapes
from irpe.cli.parse import change_config, wrap
from irpe.errors import UserError, check_choice
from irpe.extras import require_installed
from irpe.progress import Event
from irpe.recipes import classification, segmentation
from irpe.train.config import SETTINGS, RunConfig

if TYPE_CHECKING:
    from irpe.ablation.cells import Cell
    from irpe.ablation.report import AblationReport

RECIPES = {**classification.RECIPES, **segmentation.RECIPES}
OFFERED = tuple(name for name in SETTINGS if name not in ("encoding", "absolute", "seed"))
_PAUSE = 0.25  # seconds between two drawings
_LEGEND = (
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
    sizes: Annotated[
        str | None, "Also evaluate classifiers at other sizes of the input: 48,64,32x64."
    ] = None,
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
        irpe ablate --data FOLDER --seeds 3 --sizes 48,96,64x96
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
        from irpe.ablation.folder import read_claim

        for folder in folders:
            read_claim(folder)
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
    others = [] if sizes is None else parse_shapes(sizes)
    recipe = recipe or _default(given)
    names = ", ".join(each.name for each in rows)
    seeds_of = f"{seeds} seed{'s' * (seeds > 1)} each"
    print(f"comparing {names}, {seeds_of} ({recipe}, {base.data})", file=sys.stderr, flush=True)
    base.check_data()
    from irpe.ablation import Ablation, parse_cluster
    from irpe.ablation import ablate as run
    from irpe.train.processes import StoppedError

    folder = output or default_folder(base.data, f"{short}-tuned" if tune else short)
    ablation = Ablation(rows, base, folder, seeds, tune, title, recipe, others)
    executor = parse_cluster(cluster, parameters, resubmit) if cluster else None
    try:
        with AblationScreen(notes) as screen, executor or nullcontext():
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


class AblationScreen:
    """Shows how an ablation goes on standard error: facts, then scores and the time that is left.

    Where there is no terminal, the end of each cell is a line.

    Args:
        notes: What to say after the facts.
    """

    def __init__(self, notes: list[str]) -> None:
        from rich.console import Console

        self.console, self.notes = Console(stderr=True, highlight=False), notes
        self.stack = ExitStack()
        self.cells: Sequence[Cell] = ()
        self.title, self.live = "", None
        self.shown: dict[str, str] = {}
        self.ended, self.drawn = 0, 0.0
        self.remaining: float | None = None

    def __enter__(self) -> "AblationScreen":
        return self

    def __exit__(self, *error: object) -> None:
        self._draw()
        self.stack.close()

    def __call__(self, event: Event) -> None:
        """Shows what will run, the table of the cells, a step of a cell, or its end."""
        from irpe.cli.console import facts_of

        result: Any = event.result
        if event.work == "facts":
            notes = (line for note in self.notes for line in wrap(note))
            for each in (*facts_of(result), *notes):
                self.console.print(each, markup=False, soft_wrap=True)
        elif event.work == "costs":
            self.stack.enter_context(self.console.status("measuring what the rows cost"))
        elif event.work == "cells":
            self._begin(result.title, result.cells)
        elif result is not None:
            self._end(event.work, result)
        else:
            self.shown[event.work] = f"{100 * event.done / max(event.total, 1):.0f} %"
            self.remaining = event.values.get("remaining")
            if time.monotonic() - self.drawn > _PAUSE:
                self._draw()

    def _begin(self, title: str, cells: "Sequence[Cell]") -> None:
        from rich.live import Live

        self._draw()
        self.stack.close()
        self.title, self.cells, self.shown, self.ended = title, cells, {}, 0
        if self.console.is_terminal:
            self.live = self.stack.enter_context(Live(console=self.console, auto_refresh=False))

    def _end(self, work: str, result: Any) -> None:
        from irpe.ablation.cells import CellResult

        self.ended += 1
        if isinstance(result, CellResult):
            first, *moved = (score.value for score in result.scores)
            self.shown[work] = f"[bold]{first:.1f}[/bold]"
            pairs = zip(result.shifts[1:], moved, strict=True)
            by = ", by ".join(f"{shift} {value:.1f}" for shift, value in pairs)
            name = result.scores[0].measure.name
            line = f"{work}: {name} {first:.1f}" + (f", moved by {by}" if by else "")
        else:
            self.shown[work], line = "[red]failed[/red]", str(result)
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
        if self.live is None:
            return
        from rich.console import Group
        from rich.table import Table

        self.drawn = time.monotonic()
        seeds = sorted({cell.config.seed for cell in self.cells})
        table = Table("", *(f"seed {seed}" for seed in seeds), box=None, title=self.title)
        for row in dict.fromkeys(cell.row.name for cell in self.cells):
            names = [cell.name for cell in self.cells if cell.row.name == row]
            table.add_row(row, *(self.shown.get(name, "") for name in names))
        state = f"{self.ended} of {len(self.cells)} cells done{self._left()}"
        self.live.update(Group(table, state), refresh=True)


def _parameters(text: str | None, cluster: str | None) -> dict[str, str]:
    """Returns the parameters of SLURM jobs in a text."""
    if text and not cluster:
        raise UserError(f"--slurm {text} needs --cluster slurm")
    pairs = [part.partition("=") for part in (text or "").split(",") if part]
    if wrong := [name for name, equals, value in pairs if not (equals and value)]:
        raise UserError(f"--slurm {text!r}: {wrong[0]!r} is not of the form NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _show(report: "AblationReport", as_json: bool) -> None:
    from irpe.ablation.report import table_lines
    from irpe.cli.console import print_json, print_lines, print_table

    if as_json:
        print_json(report.as_json())
        return
    columns, *rows = table_lines(report.rows, is_whole=False)
    print_table(columns, rows)
    legend = wrap(_LEGEND.format(report.rows[0].measure.name))
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
