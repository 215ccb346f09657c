"""The runs of an ablation: one cell per row and seed, all with the same budget."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from irpe.ablation.rows import AblationRow
from irpe.ablation.shifts import classify_shifted
from irpe.files import write_text
from irpe.profile.count import count_macs, count_parameters
from irpe.profile.measure import interleaved
from irpe.progress import NO_PROGRESS, Progress
from irpe.train.classification.config import ClassifierConfig
from irpe.train.classification.model import build_model
from irpe.train.classification.scores import Score
from irpe.train.classification.sources import Source
from irpe.train.classification.task import ClassificationTask
from irpe.train.engine import fit
from irpe.train.processes import make_accelerator

SHIFTS = (0, 1, 2)  # patches; 0 is the image as it is
_RESULT = "result.json"
_MOST_TIMED = 64  # images in a step that is timed, on the CPU


@dataclass(frozen=True)
class Cell:
    """A row with a seed, and the directory of its run.

    Args:
        row: The row.
        config: The run's configuration.
        directory: The run's directory, another one for each configuration.
    """

    row: AblationRow
    config: ClassifierConfig
    directory: Path

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
        correct: For each shift of the test images: whether each one was classified correctly.
        top5: Percent of the unshifted images with the right class among the first five.
    """

    row: str
    seed: int
    correct: tuple[tuple[bool, ...], ...]
    top5: float

    def top1(self, shift: int = 0) -> float:
        """Returns the percent of images classified correctly after a shift by some patches."""
        return 100 * sum(self.correct[shift]) / len(self.correct[shift])


@dataclass(frozen=True)
class RowCost:
    """What a row costs in training.

    Args:
        parameters: The number of learned parameters.
        macs: Multiply-accumulates for one image.
        step: Seconds of a forward and a backward pass over a batch, the best of some rounds.
    """

    parameters: int
    macs: int
    step: float


def plan_cells(
    rows: Sequence[AblationRow],
    base: ClassifierConfig,
    seeds: int,
    data: tuple[Source, Source],
    directory: Path,
) -> list[Cell]:
    """Returns the cells, one seed after the other.

    Args:
        rows: What is compared.
        base: The budget of every cell.
        seeds: How many runs each row gets.
        data: The images to train on, and those to evaluate on.
        directory: Where the cells are stored, each under a name of its own for each configuration
            and data.
    """
    if seeds < 1:
        raise ValueError(f"seeds = {seeds} must be at least 1")
    if len({row.name for row in rows}) < len(rows):
        raise ValueError(f"rows {', '.join(row.name for row in rows)}: two have the same name")
    images = [(len(source), list(source.classes)) for source in data]
    cells: list[Cell] = []
    for seed in range(seeds):
        for row in rows:
            config = base.replace(encoding=row.encoding, absolute=row.absolute, seed=seed)
            content = config.to_json() + json.dumps(images)
            key = hashlib.sha256(content.encode()).hexdigest()[:8]
            name = "".join(c if c.isalnum() else "-" for c in row.name)
            cells.append(Cell(row, config, directory / "cells" / f"{name}-{seed}-{key}"))
    return cells


def run_cells(
    cells: Sequence[Cell],
    data: tuple[Source, Source],
    progress: Progress = NO_PROGRESS,
    cell_progress: Callable[[Cell], Progress] = lambda _: NO_PROGRESS,
) -> list[CellResult]:
    """Runs every cell that has not ended yet, and returns the results of all.

    Args:
        cells: The cells.
        data: The images to train on, and those to evaluate on.
        progress: Is told how many cells are done, and what each found.
        cell_progress: Returns what is told how the run of a cell goes.
    """
    progress.start("all cells", len(cells))
    results: list[CellResult] = []
    for done, cell in enumerate(cells, 1):
        result = _read_result(cell) or _run_cell(cell, data, cell_progress(cell))
        results.append(result)
        progress.step(done, {})
        scores = {f"top1 shifted by {shift}": result.top1(shift) for shift in SHIFTS[1:]}
        progress.report(cell.name, {"top1": result.top1(), **scores})
    return results


def measure_row_costs(
    cells: Sequence[Cell], num_classes: int, rounds: int = 10
) -> dict[str, RowCost]:
    """Returns what the rows cost; times alternate between them, for the machine may be busy."""
    first = {cell.row.name: cell for cell in reversed(cells)}
    models = {name: build_model(cell.config, num_classes) for name, cell in first.items()}
    config = cells[0].config
    count = min(config.device_batch_size or config.batch_size, _MOST_TIMED)
    images = torch.randn(count, config.channels, config.image_size, config.image_size)
    best = interleaved(
        {name: partial(_step, model.train(), images) for name, model in models.items()}, rounds
    )
    return {
        name: RowCost(count_parameters(model), count_macs(model, images[:1]), best[name])
        for name, model in models.items()
    }


def _run_cell(cell: Cell, data: tuple[Source, Source], progress: Progress) -> CellResult:
    accelerator = make_accelerator(cell.config.precision)
    if accelerator.num_processes > 1:
        raise ValueError("an ablation runs in one process: start it without torchrun")
    task = ClassificationTask(cell.config, *data)
    fitted = fit(task, cell.directory, accelerator, progress)
    score = fitted.score or task.evaluate(fitted.model, accelerator)
    assert isinstance(score, Score)
    workers = cell.config.workers
    shifted = classify_shifted(fitted.model, task.val_images, SHIFTS[1:], accelerator, workers)
    correct = (score.correct, *shifted)
    result = CellResult(cell.row.name, cell.config.seed, correct, score.top5)
    write_text(cell.directory / _RESULT, json.dumps(dataclasses.asdict(result)) + "\n")
    return result


def _read_result(cell: Cell) -> CellResult | None:
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


def _step(model: nn.Module, images: Tensor) -> None:
    model.zero_grad()
    model(images).square().mean().backward()
