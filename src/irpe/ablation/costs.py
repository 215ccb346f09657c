"""What the rows of an ablation cost: parameters, multiply-accumulates, time and memory."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from irpe.ablation.cells import AblationConfig, AblationTask, Cell
from irpe.profile.count import count_macs, count_parameters
from irpe.profile.measure import interleaved, peak_memory
from irpe.train.image_files import CACHE_BYTES

_MOST_TIMED = 64  # images in a step that is timed, on the CPU
_STATES = 4  # of each parameter in training: value, gradient, two moments


@dataclass(frozen=True)
class RowCost:
    """What a row costs in training.

    Args:
        parameters: The number of learned parameters.
        macs: Multiply-accumulates for one image.
        step: CPU seconds of a forward and a backward pass over a batch, the best of some rounds.
    """

    parameters: int
    macs: int
    step: float


def tasks_of_rows(cells: Sequence[Cell], task: AblationTask) -> dict[str, AblationTask]:
    """Returns the task of each row, with the images of another task.

    Args:
        cells: The cells.
        task: A task with the same images.
    """
    return {
        cell.row.name: dataclasses.replace(task, config=cell.config)  # pyright: ignore[reportArgumentType]
        for cell in first_cells(cells)
    }


def measure_row_costs(tasks: Mapping[str, AblationTask], rounds: int = 10) -> dict[str, RowCost]:
    """Returns what the rows cost; steps have one thread and take turns.

    Args:
        tasks: The task of each row, of which none is running.
        rounds: How many steps of each row are timed.
    """
    models = {name: task.build() for name, task in tasks.items()}
    images = _random_images(next(iter(tasks.values())).config, _MOST_TIMED)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        best = interleaved(
            {name: partial(_step, model.train(), images) for name, model in models.items()},
            rounds,
            time.process_time,
        )
    finally:
        torch.set_num_threads(threads)
    return {
        name: RowCost(count_parameters(model), count_macs(model, images[:1]), best[name])
        for name, model in models.items()
    }


def first_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Returns the first cell of each row."""
    return list({cell.row.name: cell for cell in reversed(cells)}.values())[::-1]


def training_memory(task: AblationTask) -> int:
    """Returns the bytes that training takes beyond the program itself, estimated from two images.

    Args:
        task: The task, whose images may be cached.
    """
    config = task.config
    model, images = task.build().train(), _random_images(config, 2)
    if len(images) < 2:
        images = images.repeat(2, 1, 1, 1)
    _step(model, images)  # builds what is built once
    model.zero_grad()
    batch = config.device_batch_size or config.batch_size
    of_images = peak_memory(partial(_step, model, images)) * batch // 2
    cached = images[0].nbytes * (len(task.train) + len(task.val))
    return (
        of_images
        + _STATES * sum(p.nbytes for p in model.parameters())
        + (cached if cached < CACHE_BYTES else 0)
    )


def _random_images(config: AblationConfig, most: int) -> Tensor:
    count = min(config.device_batch_size or config.batch_size, most)
    return torch.randn(count, *config.input_shape)


def _step(model: nn.Module, images: Tensor) -> None:
    model.zero_grad()
    model(images).square().mean().backward()
