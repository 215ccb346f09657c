"""What the rows of an ablation cost: parameters, multiply-accumulates, time and memory."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from irpe.ablation.cells import Cell
from irpe.profile.count import count_macs_in, count_parameters
from irpe.profile.measure import interleaved
from irpe.progress import silent
from irpe.train.config import RunConfig, make_task
from irpe.train.processes import Sample, make_accelerator
from irpe.train.task import Condition, Images, Task

_MOST_TIMED = 64  # images in a step that is timed, on the CPU
_QUIET = 0.1  # by how much ratios of two measurements may differ
_MOST_TRIES = 3


@dataclass(frozen=True)
class RowCost:
    """What a row costs in training."""

    parameters: int
    macs: int  # for one image
    step: float  # CPU seconds of a forward and a backward pass over a batch, the best of some
    noise: float = 0.0  # by how much two measurements differ, relative to those of the other rows

    @property
    def is_noisy(self) -> bool:
        """Whether the machine was too busy to time the step."""
        return self.noise > _QUIET


def configs_of_rows(cells: Sequence[Cell], config: RunConfig) -> dict[str, RunConfig]:
    """Returns the configuration of each row's first cell, with the classes of another one."""
    names = dict.fromkeys(cell.row.name for cell in cells)
    first = {cell.row.name: cell.config for cell in reversed(cells)}
    return {name: first[name].replace(classes=config.classes) for name in names}


def measure_row_costs(
    configs: Mapping[str, RunConfig], task: Task, rounds: int = 5
) -> dict[str, RowCost]:
    """Returns what the rows cost; steps have one thread and take turns.

    They are timed twice, and once more where the ratios of the two differ: the machine was busy.
    """
    accelerator = make_accelerator(device="cpu")
    tasks = {name: make_task(config) for name, config in configs.items()}
    models = {name: each.build() for name, each in tasks.items()}
    config, shape = task.config, task.config.input_shape
    train, most = task.open("train", None, silent), config.device_batch_size or config.batch_size
    batch = _batch(train, min(most, _MOST_TIMED, len(train)))
    size = shape[1:] if shape is not None and "size" in task.takes else None
    one = _batch(task.open("train", Condition(size=size), silent), 1)

    def step(name: str) -> None:
        models[name].zero_grad()
        for loss in tasks[name].losses(models[name], [batch], accelerator):
            loss.backward()

    steps: dict[str, Callable[[], object]] = {
        name: partial(step, name) for name, model in models.items() if model.train()
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
            count_parameters(model),
            count_macs_in(model, partial(tasks[name].predict, model, one, accelerator.device)),
            best[name],
            noise[name],
        )
        for name, model in models.items()
    }


def _noise(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Returns by how much the times of rows differ, relative to the change of the fastest row."""
    fastest = min(before, key=before.__getitem__)
    usual = after[fastest] / before[fastest]
    return {name: abs(after[name] / before[name] / usual - 1) for name in before}


def _batch(images: Images, count: int) -> Any:
    return images.collate([images[Sample(0, index, index)] for index in range(count)])
