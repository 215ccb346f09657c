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
from irpe.ablation.shifts import classify_shifted
from irpe.errors import UserError
from irpe.files import clean_name, write_text
from irpe.progress import NO_PROGRESS, Event, Listener, silent
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.sources import hold_out, open_images
from irpe.tasks.classify.task import ClassificationTask
from irpe.tasks.segment.config import SegmenterConfig
from irpe.tasks.segment.task import SegmentationTask
from irpe.tasks.segment.task import open_split as open_pixels_of
from irpe.train.engine import fit
from irpe.train.overview import effect_on_images
from irpe.train.processes import make_accelerator
from irpe.train.score import Measure, Score
from irpe.train.task import Task, open_task

AblationConfig = ClassifierConfig | SegmenterConfig
AblationTask = ClassificationTask | SegmentationTask
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
    config: AblationConfig
    directory: Path
    held_out: float = 0.0

    @property
    def name(self) -> str:
        """What to call it."""
        return f"{self.row.name}, seed {self.config.seed}"


def plan_cells(
    rows: Sequence[AblationRow],
    base: AblationConfig,
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


def run_cell(cell: Cell, listen: Listener = silent) -> CellResult:
    """Trains a cell to the end in this process, evaluates it, and writes and returns its result."""
    began = time.monotonic()
    accelerator = make_accelerator(cell.config.precision)
    if accelerator.num_processes > 1:
        raise UserError("an ablation starts processes of its own: start it without torchrun")
    is_new = not (cell.directory / "checkpoint.pt").exists()
    task: Any = _open_task(cell)
    fitted = fit(task, cell.directory, accelerator, _Spoken(listen))
    score: Any = fitted.score or task.evaluate(fitted.model, accelerator)
    scores, shifts = _scores(task, score, fitted.model, accelerator)
    effect = effect_on_images(task, fitted.model, accelerator)
    seconds = round(time.monotonic() - began, 1) if is_new else None
    machine = describe_machine(accelerator.device)
    result = CellResult(cell.row.name, cell.config.seed, scores, shifts, effect, seconds, machine)
    write_text(cell.directory / _RESULT, json.dumps(result.to_json()) + "\n")
    return result


def _scores(task: Any, score: Any, model: Any, accelerator: Any) -> tuple[Any, Any]:
    if not isinstance(task, ClassificationTask):
        import torch

        counts = torch.tensor(score.images, dtype=torch.float64)

        def miou(c: Any) -> Any:
            correct, true, predicted = c.unbind(-2)
            return 100 * (correct / (true + predicted - correct)).nanmean(-1)

        without = miou(counts.sum(0) - counts)
        values = miou(counts.sum(0)) + (len(counts) - 1) * (without.mean() - without)
        measures = (Measure("mIoU", "mIoU", "%"), Measure("pixel_accuracy", "pixel accuracy", "%"))
        details = {"mIoU": float(miou(counts.sum(0))), "pixel_accuracy": score.pixel_accuracy}
        true = counts.sum(0)[1]
        chance = float(100 * true.max() / true.sum() / (true > 0).sum())  # one class everywhere
        values = tuple(values.tolist())
        return (Score(measures, details, values, chance=chance, num_images=len(counts)),), (0,)
    measures = (Measure("top1", "top-1", "%"), Measure("top5", "top-5", "%"))
    moved = classify_shifted(model, task.val_images, (1, 2), accelerator, task.config.workers)
    found = []
    for correct in (score.correct, *moved):
        values = tuple(100.0 * each for each in correct)
        details = {"top1": sum(values) / len(values), "top5": score.top5}
        found.append(Score(measures, details, values, chance=score.chance, num_images=len(values)))
    return tuple(found), (0, 1, 2)


class _Spoken:
    def __init__(self, listen: Listener) -> None:
        self.listen, self.total = listen, 0

    def start(self, name: str, total: int, done: int = 0) -> None:
        self.total = total
        self.listen(Event("training", done, total))

    def step(self, done: int, values: Any) -> None:
        self.listen(Event("training", done, self.total))

    def report(self, name: str, values: Any) -> None: ...


def _open_task(cell: Cell) -> Task:
    """Returns the task of a cell; one that holds training images out opens no others."""
    config = cell.config
    if not cell.held_out:
        return open_task(config, NO_PROGRESS, None)
    if isinstance(config, SegmenterConfig):
        train = open_pixels_of(config, config.train_split)
        return hold_out_of(SegmentationTask(config, train, train), cell.held_out)
    images, _ = open_images(config.data, config.root, config.holdout)
    return hold_out_of(ClassificationTask(config, images, images), cell.held_out)


def hold_out_of(task: AblationTask, fraction: float) -> AblationTask:
    """Returns a task that is evaluated on a fraction of its training images, without the others.

    Args:
        task: The task.
        fraction: How many of its training images are held out.
    """
    if isinstance(task, SegmentationTask):
        train, val = task.train.hold_out(fraction)
        return dataclasses.replace(task, train=train, val=val)
    images, held_out = hold_out(task.train, fraction)
    return dataclasses.replace(task, train=images, val=held_out)


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
