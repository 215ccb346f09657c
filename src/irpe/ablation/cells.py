"""The runs of an ablation: one cell per row and seed, all with the same budget."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irpe.ablation.rows import AblationRow
from irpe.ablation.shifts import classify_shifted
from irpe.files import write_text
from irpe.progress import NO_PROGRESS, Progress
from irpe.train.classification.config import ClassifierConfig
from irpe.train.classification.scores import Score
from irpe.train.classification.sources import hold_out, open_images
from irpe.train.classification.task import ClassificationTask, open_task
from irpe.train.engine import fit
from irpe.train.overview import effect_on_images
from irpe.train.processes import make_accelerator

SHIFTS = (0, 1, 2)  # patches; 0 is the image as it is
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
    config: ClassifierConfig
    directory: Path
    held_out: float = 0.0

    @property
    def name(self) -> str:
        """What to call it."""
        return f"{self.row.name}, seed {self.config.seed}"


@dataclass(frozen=True)
class CellResult:
    """What a cell found.

    Args:
        row: The name of the row.
        seed: The seed.
        correct: For each shift of the images: whether each one was classified correctly.
        top5: Percent of the unshifted images with the right class among the first five.
        effect: How much of the attention the encoding is; `None` without an encoding.
    """

    row: str
    seed: int
    correct: tuple[tuple[bool, ...], ...]
    top5: float
    effect: float | None = None

    def top1(self, shift: int = 0) -> float:
        """Returns the percent of images classified correctly after a shift by some patches."""
        return 100 * sum(self.correct[shift]) / len(self.correct[shift])


def plan_cells(
    rows: Sequence[AblationRow],
    base: ClassifierConfig,
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
        raise ValueError(f"seeds = {seeds} must be at least 1")
    if len({row.name for row in rows}) < len(rows):
        raise ValueError(f"rows {', '.join(row.name for row in rows)}: two have the same name")
    cells: list[Cell] = []
    for seed in range(seeds):
        for row in rows:
            config = base.replace(
                encoding=row.encoding, absolute=row.absolute, seed=seed, **row.rates
            )
            folder = directory / (f"held-out-{held_out:g}" if held_out else "cells")
            key = hashlib.sha256(config.to_json().encode()).hexdigest()[:8]
            name = "".join(c if c.isalnum() else "-" for c in row.name)
            cells.append(Cell(row, config, folder / f"{name}-{seed}-{key}", held_out))
    return cells


def run_cell(cell: Cell, progress: Progress = NO_PROGRESS) -> CellResult:
    """Trains a cell to the end in this process, evaluates it, and writes and returns its result."""
    accelerator = make_accelerator(cell.config.precision)
    if accelerator.num_processes > 1:
        raise ValueError("an ablation starts processes of its own: start it without torchrun")
    task = _open_task(cell)
    fitted = fit(task, cell.directory, accelerator, progress)
    score = fitted.score or task.evaluate(fitted.model, accelerator)
    assert isinstance(score, Score)
    workers = cell.config.workers
    shifted = classify_shifted(fitted.model, task.val_images, SHIFTS[1:], accelerator, workers)
    effect = effect_on_images(task, fitted.model, accelerator)
    correct = (score.correct, *shifted)
    result = CellResult(cell.row.name, cell.config.seed, correct, score.top5, effect)
    write_text(cell.directory / _RESULT, json.dumps(dataclasses.asdict(result)) + "\n")
    return result


def _open_task(cell: Cell) -> ClassificationTask:
    if not cell.held_out:
        return open_task(cell.config)
    config = cell.config
    train, _ = open_images(config.data, config.root, config.holdout)
    return ClassificationTask(config, *hold_out(train, cell.held_out))


def read_result(cell: Cell) -> CellResult | None:
    """Returns what a cell found; `None` if it has not ended yet."""
    path = cell.directory / _RESULT
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        content["correct"] = tuple(tuple(map(bool, of_shift)) for of_shift in content["correct"])
        content["row"] = cell.row.name
        return CellResult(**content)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path} is damaged, or of another release: {error!r}; remove {cell.directory}"
        ) from error
