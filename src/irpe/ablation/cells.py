"""The runs of an ablation: one cell per row and seed, all with the same budget."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irpe.ablation.results import TOP1, CellResult, make_result, parse_result
from irpe.ablation.rows import AblationRow
from irpe.ablation.shifts import classify_shifted
from irpe.errors import UserError
from irpe.files import clean_name, write_text
from irpe.progress import NO_PROGRESS, Progress
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.sources import hold_out, open_images
from irpe.tasks.classify.task import ClassificationTask
from irpe.tasks.segment.config import SegmenterConfig
from irpe.tasks.segment.task import SegmentationTask
from irpe.tasks.segment.task import open_split as open_pixels_of
from irpe.train.engine import fit
from irpe.train.overview import effect_on_images
from irpe.train.processes import make_accelerator
from irpe.train.task import Task, open_task

AblationConfig = ClassifierConfig | SegmenterConfig
AblationTask = ClassificationTask | SegmentationTask
_RESULT = "result.json"


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
    if seeds < 1:
        raise UserError(f"seeds = {seeds} must be at least 1")
    if len({row.name for row in rows}) < len(rows):
        raise UserError(f"rows {', '.join(row.name for row in rows)}: two have the same name")
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


def run_cell(cell: Cell, progress: Progress = NO_PROGRESS) -> CellResult:
    """Trains a cell to the end in this process, evaluates it, and writes and returns its result."""
    accelerator = make_accelerator(cell.config.precision)
    if accelerator.num_processes > 1:
        raise UserError("an ablation starts processes of its own: start it without torchrun")
    task: Any = _open_task(cell)
    fitted = fit(task, cell.directory, accelerator, progress)
    score: Any = fitted.score or task.evaluate(fitted.model, accelerator)
    shifted: list[tuple[bool, ...]] = []
    if isinstance(task, ClassificationTask):
        images, shifts, workers = task.val_images, TOP1.shifts[1:], cell.config.workers
        shifted = classify_shifted(fitted.model, images, shifts, accelerator, workers)
    effect = effect_on_images(task, fitted.model, accelerator)
    result = make_result(cell.row.name, cell.config.seed, score, shifted, effect)
    write_text(cell.directory / _RESULT, json.dumps(dataclasses.asdict(result)) + "\n")
    return result


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
    """Returns what a cell found; `None` if it has not ended yet."""
    path = cell.directory / _RESULT
    if not path.is_file():
        return None
    try:
        return parse_result(json.loads(path.read_text()), cell.row.name)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged, or of another release: {error!r}; remove {cell.directory}"
        ) from error
