"""What the rows of an ablation cost: parameters, multiply-accumulates, time and memory."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from irpe.ablation.cells import AblationConfig, AblationTask, Cell
from irpe.profile.count import count_macs, count_parameters
from irpe.profile.measure import interleaved

_MOST_TIMED = 64  # images in a step that is timed, on the CPU
_QUIET = 0.1  # by how much ratios of two measurements may differ
_MOST_TRIES = 3


@dataclass(frozen=True)
class RowCost:
    """What a row costs in training.

    Args:
        parameters: The number of learned parameters.
        macs: Multiply-accumulates for one image.
        step: CPU seconds of a forward and a backward pass over a batch, the best of some rounds.
        noise: By how much two measurements of the step differ, relative to that of the other rows.
    """

    parameters: int
    macs: int
    step: float
    noise: float = 0.0

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was too busy to time the step."""
        return self.noise > _QUIET


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


def measure_row_costs(tasks: Mapping[str, AblationTask], rounds: int = 5) -> dict[str, RowCost]:
    """Returns what the rows cost; steps have one thread and take turns.

    They are timed twice, and once more where the ratios of the two differ: the machine was busy.

    Args:
        tasks: The task of each row, of which none is running.
        rounds: How many steps of each row are timed in a measurement.
    """
    models = {name: task.build() for name, task in tasks.items()}
    images = _random_images(next(iter(tasks.values())).config, _MOST_TIMED)
    steps: dict[str, Callable[[], object]] = {
        name: partial(_step, model.train(), images) for name, model in models.items()
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        last = interleaved(steps, rounds, time.process_time)
        best, noise = last, dict.fromkeys(last, 0.0)
        for _ in range(_MOST_TRIES - 1):
            before, last = best, interleaved(steps, rounds, time.process_time)
            noise = _noise(before, last)
            best = {name: min(best[name], last[name]) for name in best}
            if max(noise.values()) <= _QUIET:
                break
    finally:
        torch.set_num_threads(threads)
    return {
        name: RowCost(
            count_parameters(model), count_macs(model, images[:1]), best[name], noise[name]
        )
        for name, model in models.items()
    }


def _noise(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Returns by how much the times of rows differ, relative to the change of the fastest row."""
    fastest = min(before, key=before.__getitem__)
    usual = after[fastest] / before[fastest]
    return {name: abs(after[name] / before[name] / usual - 1) for name in before}


def first_cells(cells: Sequence[Cell]) -> list[Cell]:
    """Returns the first cell of each row."""
    return list({cell.row.name: cell for cell in reversed(cells)}.values())[::-1]


def _random_images(config: AblationConfig, most: int) -> Tensor:
    count = min(config.device_batch_size or config.batch_size, most)
    return torch.randn(count, *config.input_shape)


def _step(model: nn.Module, images: Tensor) -> None:
    model.zero_grad()
    model(images).square().mean().backward()
