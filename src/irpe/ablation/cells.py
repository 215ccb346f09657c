"""The runs of an ablation: one cell per row and seed, all with the same budget."""

import dataclasses
import hashlib
import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import timm
import torch

import irpe
from irpe.ablation.rows import AblationRow, check_rows
from irpe.errors import UserError
from irpe.files import clean_name, write_text
from irpe.progress import Listener, silent
from irpe.train.config import RunConfig, make_task
from irpe.train.engine import Trainer
from irpe.train.evaluation import evaluate, measure_effect_of
from irpe.train.images import held_out_indices
from irpe.train.processes import Part, make_accelerator
from irpe.train.run import Run
from irpe.train.task import Condition, Score, Split, Task

_RESULT = "result.json"
At = int | str  # by how many patches images are moved, or the name of another size


@dataclass(frozen=True)
class CellResult:
    """What a cell found."""

    row: str
    seed: int
    scores: tuple[Score, ...]  # under each condition, images as they are first
    shifts: tuple[int, ...] = (0,)  # by how many patches images were moved under each condition
    effect: float | None = None  # how much the attention's output changes without the encoding
    seconds: float | None = field(default=None, compare=False)
    machine: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)
    sizes: Mapping[str, Score] = field(default_factory=dict[str, Score])  # scores at other sizes

    def score(self, at: At = 0) -> Score:
        """Returns the score of images that were moved by some patches, or at another size."""
        return self.sizes[at] if isinstance(at, str) else self.scores[self.shifts.index(at)]

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes."""
        scores = [score.to_json() for score in self.scores]
        sizes = {size: score.to_json() for size, score in self.sizes.items()}
        return {**dataclasses.asdict(self), "scores": scores, "sizes": sizes}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], row: str) -> "CellResult":
        """Returns the result that `to_json` described, under the name of its row."""
        fields: dict[str, Any] = {**content, "row": row, "shifts": tuple(content["shifts"])}
        fields["scores"] = tuple(map(Score.from_json, content["scores"]))
        sizes = content.get("sizes", {})
        fields["sizes"] = {size: Score.from_json(score) for size, score in sizes.items()}
        return cls(**fields)


@dataclass(frozen=True)
class Cell:
    """A row with a seed, and the directory of its run."""

    row: AblationRow
    config: RunConfig
    directory: Path
    held_out: float = 0.0  # of the training images, that it is evaluated on; 0: none
    sizes: tuple[tuple[int, int], ...] = ()  # of the input, that it is evaluated at besides

    @property
    def name(self) -> str:
        """What to call it."""
        return f"{self.row.name}, seed {self.config.seed}"


def plan_cells(
    rows: Sequence[AblationRow],
    base: RunConfig,
    seeds: int,
    directory: Path,
    held_out: float = 0.0,
    sizes: Sequence[tuple[int, int]] = (),
) -> list[Cell]:
    """Returns the cells of an ablation's folder, one seed after the other.

    Each configuration has a directory of its own. Of a search for rates (`held_out`), all are
    evaluated on that fraction of the training images.
    """
    check_rows(rows, seeds)
    folder = directory / (f"held-out-{held_out:g}" if held_out else "cells")
    cells: list[Cell] = []
    for seed in range(seeds):
        for row in rows:
            fields = {"encoding": row.encoding, "absolute": row.absolute, "seed": seed}
            config = base.replace(**fields, **row.rates)
            key = hashlib.sha256(config.to_json().encode()).hexdigest()[:8]
            name = f"{clean_name(row.name)}-{seed}-{key}"
            cells.append(Cell(row, config, folder / name, held_out, tuple(sizes)))
    return cells


class HeldOut:
    """A task that is evaluated on a fraction of its training images, and trained on the others."""

    def __init__(self, task: Task, fraction: float) -> None:
        self.task, self.fraction = task, fraction

    def __getattr__(self, name: str) -> Any:
        return getattr(self.task, name)

    def open(self, split: Split, condition: Condition | None, listen: Listener = silent) -> Part:
        """Returns the images to train on, or those held out: always the same."""
        images = self.task.open("train", condition, listen)
        parts = held_out_indices(len(images), self.fraction)
        return Part(images, parts[split == "val"])


def task_of(cell: Cell) -> Task:
    """Returns the task of a cell; one that holds training images out opens no others."""
    task = make_task(cell.config)
    held_out: Any = HeldOut(task, cell.held_out)
    return held_out if cell.held_out else task


def run_cell(cell: Cell, listen: Listener = silent) -> CellResult:
    """Trains a cell to the end in this process, evaluates it, and writes and returns its result."""
    began = time.monotonic()
    accelerator = make_accelerator(cell.config.precision)
    if accelerator.num_processes > 1:
        raise UserError("an ablation starts processes of its own: start it without torchrun")
    run, task = Run(cell.directory), task_of(cell)
    is_new = not run.has_checkpoint
    fitted = Trainer(task, run, accelerator, listen).fit()
    shifts = (0, 1, 2) if "shift" in task.takes else (0,)
    left = shifts if fitted.score is None else shifts[1:]
    conditions = [Condition(shift=shift) for shift in left]
    conditions += [Condition(size=size) for size in cell.sizes]
    found = [each.score for each in evaluate((task, fitted.model), conditions, accelerator)]
    moved, sized = found[: len(left)], found[len(left) :]
    scores = tuple(moved if fitted.score is None else [fitted.score, *moved])
    sizes = dict(zip(map(_name_of, cell.sizes), sized, strict=True))
    effect = measure_effect_of(task, fitted.model, accelerator)
    seconds = round(time.monotonic() - began, 1) if is_new else None
    machine = describe_machine(accelerator.device)
    result = CellResult(
        cell.row.name, cell.config.seed, scores, shifts, effect, seconds, machine, sizes
    )
    write_text(cell.directory / _RESULT, json.dumps(result.to_json()) + "\n")
    return result


def read_result(cell: Cell) -> CellResult | None:
    """Returns what a cell found; `None` if it has not found all, or did in an older release."""
    path = cell.directory / _RESULT
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        missing = {*map(_name_of, cell.sizes)} - {*content.get("sizes", ())}
        if "scores" not in content or missing:
            return None
        return CellResult.from_json(content, cell.row.name)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged, or of another release: {error!r}; remove {cell.directory}"
        ) from error


def _name_of(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


def describe_machine(device: torch.device) -> dict[str, str]:
    """Returns what scores may depend on, beside the settings, by the name of each fact."""
    q = torch.zeros(1, 1, 4, 8, device=device)
    maps = irpe.bucket_maps("product-contextual-k", (2, 2))
    table = torch.zeros(1, 49, 8, device=device)
    is_gpu = device.type == "cuda"
    return {
        "irpe": irpe.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "implementation": irpe.explain(q, q, q, maps, key_tables=[table]).name,
        "processor": torch.cuda.get_device_name(device) if is_gpu else _processor(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
