"""Encodings against one another: every row and seed with the same budget, one run a cell."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn

from irpe.files import write_text
from irpe.profile.count import count_macs, count_parameters
from irpe.profile.measure import interleaved
from irpe.train.classification.model import build_model
from irpe.train.classification.sources import Source
from irpe.train.classification.task import Classification
from irpe.train.config import ClassifierConfig
from irpe.train.engine import fit, make_accelerator
from irpe.train.logs import Monitor
from irpe.train.sampling import Images, every_batch
from irpe.viz.training import read_metrics

MOVES = (0, 1, 2)
_RESULT = "result.json"
_BATCH = 256  # images at a time in evaluation
_MOST_TIMED = 64  # images in a step that is timed, on the CPU
_DIRECTIONS = ((0, 1), (1, 0), (0, -1), (-1, 0))


@dataclass(frozen=True)
class Row:
    """What is compared with other rows.

    Args:
        name: What to call it.
        encoding: The relative encoding, or "none".
        absolute: What becomes of the absolute one.
    """

    name: str
    encoding: str
    absolute: str


@dataclass(frozen=True)
class Cell:
    """A row with a seed, and where its run is kept.

    Args:
        row: The row.
        config: The run's configuration.
        directory: The run's directory, another for each configuration.
    """

    row: Row
    config: ClassifierConfig
    directory: Path


@dataclass(frozen=True)
class Result:
    """What became of a cell.

    Args:
        row: The name of the row.
        seed: The seed.
        hits: For images moved by 0, 1 and 2 patches: a digit for each test image, 1 if it was told
            right.
        top5: Percent of the images as they are with the right class among the first five.
    """

    row: str
    seed: int
    hits: tuple[str, ...]
    top5: float

    def top1(self, moved: int = 0) -> float:
        """Returns the percent of images told right, moved by some patches."""
        return 100 * self.hits[moved].count("1") / len(self.hits[moved])


@dataclass(frozen=True)
class Cost:
    """What a row costs.

    Args:
        parameters: Numbers that are learned.
        macs: Multiply-accumulates for one image.
        step: Seconds of a forward and a backward pass over a batch, the best of some turns.
    """

    parameters: int
    macs: int
    step: float


class Table(Protocol):
    """Is told how an ablation goes, to show it."""

    def begin(self, cell: Cell) -> Monitor:
        """A cell begins; returns what shows its run."""
        ...

    def end(self, cell: Cell, result: Result) -> None:
        """A cell has ended, or was kept from before."""
        ...


def plan(
    rows: Sequence[Row],
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
        directory: Where the cells are kept, another place for each configuration and data.
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


def run_cells(cells: Sequence[Cell], data: tuple[Source, Source], table: Table) -> list[Result]:
    """Runs every cell that has not ended yet, and returns the results of all.

    Args:
        cells: The cells.
        data: The images to train on, and those to evaluate on.
        table: Is told how it goes.
    """
    results: list[Result] = []
    for cell in cells:
        monitor = table.begin(cell)
        result = _read_result(cell) or _run_cell(cell, data, monitor)
        table.end(cell, result)
        results.append(result)
    return results


def measure_costs(cells: Sequence[Cell], num_classes: int, rounds: int = 10) -> dict[str, Cost]:
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
        name: Cost(count_parameters(model), count_macs(model, images[:1]), best[name])
        for name, model in models.items()
    }


def make_mover(patches: int, patch_size: int, black: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that moves images by some patches: each one right, down, left or up.

    Args:
        patches: How far.
        patch_size: The side of a patch in pixels.
        black: What comes into view, a number for each channel.
    """

    def move(images: Tensor) -> Tensor:
        moved = black.to(images).view(-1, 1, 1).expand_as(images).contiguous()
        for number, (down, right) in enumerate(_DIRECTIONS):
            dy, dx = (patches * patch_size * step for step in (down, right))
            height, width = images.shape[-2:]
            target = moved[number :: len(_DIRECTIONS)]
            source = images[number :: len(_DIRECTIONS)]
            target[..., max(dy, 0) : height + min(dy, 0), max(dx, 0) : width + min(dx, 0)] = source[
                ..., max(-dy, 0) : height + min(-dy, 0), max(-dx, 0) : width + min(-dx, 0)
            ]
        return moved

    return move


def find_hits(
    model: nn.Module,
    images: Images,
    moves: Sequence[int],
    accelerator: Accelerator,
    workers: int = 0,
) -> tuple[str, ...]:
    """Returns, for images moved by some patches, which of them the model tells right."""
    device = accelerator.device
    embedding: Any = model.get_submodule("patch_embed")
    black = images.transform(Image.new(images.mode, (8, 8)))[:, 0, 0]
    movers = [make_mover(count, embedding.patch_size[0], black) for count in moves]
    hits: list[list[bool]] = [[] for _ in moves]
    with torch.no_grad(), accelerator.autocast():
        for batch in every_batch(images, _BATCH, workers):
            readable = ~batch.broken
            pixels, labels = batch.images[readable].to(device), batch.labels[readable].to(device)
            for found, move in zip(hits, movers, strict=True):
                found += (model(move(pixels)).argmax(1) == labels).tolist()
    return tuple("".join("01"[hit] for hit in found) for found in hits)


def _run_cell(cell: Cell, data: tuple[Source, Source], monitor: Monitor) -> Result:
    accelerator = make_accelerator(cell.config.precision)
    if accelerator.num_processes > 1:
        raise ValueError("an ablation runs in one process: start it without torchrun")
    task = Classification(cell.config, *data)
    model = fit(task, cell.directory, monitor, accelerator).eval()
    hits = find_hits(model, task.val_images, MOVES, accelerator, cell.config.workers)
    top5 = read_metrics(cell.directory)["top5"][-1]
    result = Result(cell.row.name, cell.config.seed, hits, top5)
    write_text(cell.directory / _RESULT, json.dumps(dataclasses.asdict(result)) + "\n")
    return result


def _read_result(cell: Cell) -> Result | None:
    path = cell.directory / _RESULT
    if not path.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        content |= {"hits": tuple(content["hits"]), "row": cell.row.name}
        return Result(**content)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged: {error!r}; remove {cell.directory}") from error


def _step(model: nn.Module, images: Tensor) -> None:
    model.zero_grad()
    model(images).square().mean().backward()
