"""The runs of an ablation: one cell per row and seed, all with the same budget."""

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from irpe.ablation.machine import describe_machine
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


@dataclass(frozen=True)
class CellResult:
    """What a cell found.

    Args:
        row: The name of the row.
        seed: The seed.
        scores: The score under each condition, images as they are first.
        shifts: How far images were moved under each condition, in patches.
        effect: How much the attention's output changes without the encoding, if any.
        seconds: How long it took, unless it was interrupted.
        machine: What it ran on, by the name of each fact.
    """

    row: str
    seed: int
    scores: tuple[Score, ...]
    shifts: tuple[int, ...] = (0,)
    effect: float | None = None
    seconds: float | None = field(default=None, compare=False)
    machine: Mapping[str, str] = field(default_factory=dict[str, str], compare=False)

    def score(self, shift: int = 0) -> Score:
        """Returns the score of images that were moved by some patches."""
        return self.scores[self.shifts.index(shift)]

    def to_json(self) -> dict[str, Any]:
        """Returns what `from_json` takes."""
        return {**dataclasses.asdict(self), "scores": [score.to_json() for score in self.scores]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any], row: str) -> "CellResult":
        """Returns the result that `to_json` described, under the name of its row."""
        fields: dict[str, Any] = {**content, "row": row, "shifts": tuple(content["shifts"])}
        fields["scores"] = tuple(map(Score.from_json, content["scores"]))
        return cls(**fields)


@dataclass(frozen=True)
class Cell:
    """A row with a seed, and the directory of its run.

    Args:
        row: The row.
        config: The run's configuration.
        directory: The run's directory, another one for each configuration.
        held_out: The fraction of the training images that it is evaluated on, in place of the test
            images. 0: it trains on all of them.
    """

    row: AblationRow
    config: RunConfig
    directory: Path
    held_out: float = 0.0

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
) -> list[Cell]:
    """Returns the cells, one seed after the other.

    Args:
        rows: What is compared.
        base: The budget of every cell.
        seeds: How many runs each row gets.
        directory: Where the cells are stored, each under a name of its own for each configuration.
        held_out: The fraction of the training images to evaluate on; 0: the test images.
    """
    check_rows(rows, seeds)
    cells: list[Cell] = []
    for seed in range(seeds):
        for row in rows:
            config = base.replace(
                encoding=row.encoding, absolute=row.absolute, seed=seed, **row.rates
            )
            folder = directory / (f"held-out-{held_out:g}" if held_out else "cells")
            key = hashlib.sha256(config.to_json().encode()).hexdigest()[:8]
            name = f"{clean_name(row.name)}-{seed}-{key}"
            cells.append(Cell(row, config, folder / name, held_out))
    return cells


class HeldOut:
    """A task that is evaluated on a fraction of its training images, and trained on the others.

    Args:
        task: The task; its images to evaluate on are not opened.
        fraction: How many of its training images are held out.
    """

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
    found = [each.score for each in evaluate((task, fitted.model), conditions, accelerator)]
    scores = tuple(found if fitted.score is None else [fitted.score, *found])
    effect = measure_effect_of(task, fitted.model, accelerator)
    seconds = round(time.monotonic() - began, 1) if is_new else None
    machine = describe_machine(accelerator.device)
    result = CellResult(cell.row.name, cell.config.seed, scores, shifts, effect, seconds, machine)
    write_text(cell.directory / _RESULT, json.dumps(result.to_json()) + "\n")
    return result


def read_result(cell: Cell) -> CellResult | None:
    """Returns what a cell found; `None` if it has not ended yet, or in an older release."""
    path = cell.directory / _RESULT
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text())
        return CellResult.from_json(content, cell.row.name) if "scores" in content else None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged, or of another release: {error!r}; remove {cell.directory}"
        ) from error
