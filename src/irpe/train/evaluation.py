"""Scores of trained models: on the images of their run as they are, or under other conditions."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from irpe.adapters.effect import effects_in, mean_effect
from irpe.errors import UserError
from irpe.progress import Listener, silent, tracked
from irpe.train.processes import (
    Batches,
    EveryImage,
    make_accelerator,
    make_loader,
    start_loading,
)
from irpe.train.run import Run, start_from
from irpe.train.task import AS_TRAINED, Condition, Images, Score, Task

_MEASURED = 16  # images that an effect is measured on


class Evaluation(NamedTuple):
    """What an evaluation found.

    Args:
        condition: How the images differed from those of the run.
        images: The images.
        score: The score.
        predictions: What the model says of each image that could be read, by its index.
    """

    condition: Condition
    images: Images
    score: Score
    predictions: dict[int, Any]


def evaluate(
    run: Run | tuple[Task, nn.Module],
    conditions: Sequence[Condition] = (AS_TRAINED,),
    accelerator: Accelerator | None = None,
    batch_size: int | None = None,
    listen: Listener = silent,
) -> Iterator[Evaluation]:
    """Yields what is found under each condition; the model is in eval mode afterwards.

    At another size a learned absolute encoding is resampled, and all else stays as it is.

    Args:
        run: The run, or a task and its model.
        conditions: How images differ from those of the run.
        accelerator: Knows the processes and the device; `None`: those that are there.
        batch_size: Images per forward pass; `None`: as many as the task has.
        listen: Hears how far it is.

    Examples:
        >>> import irpe.train
        >>> run = irpe.train.Run("runs/laptop")
        >>> shifted = [irpe.train.Condition(shift=shift) for shift in (0, 1, 2)]
        >>> found = list(irpe.train.evaluate(run, shifted))  # doctest: +SKIP
        >>> [each.score.value for each in found]  # doctest: +SKIP
    """
    task, model = run.open() if isinstance(run, Run) else run
    accelerator = accelerator or make_accelerator()
    for condition in conditions:
        condition.check(task)
        with accelerator.local_main_process_first():  # it may compute features
            images = task.open("val", condition, listen)
        sized = model
        if condition.size is not None:
            sized = task.build(condition.size)
            start_from(sized, model.state_dict(), "the run")
        sized = sized.to(accelerator.device)
        found, broken = predict_all(task, sized, images, accelerator, batch_size, listen)
        yield Evaluation(condition, images, score_of(task, images, found, broken), found)


def predict_all(
    task: Task,
    model: nn.Module,
    images: Images,
    accelerator: Accelerator,
    batch_size: int | None = None,
    listen: Listener = silent,
) -> tuple[dict[int, Any], list[int]]:
    """Returns what a model says of each image by its index, and the images that were unreadable."""
    ranks = accelerator.num_processes, accelerator.process_index
    batches = Batches(
        EveryImage(len(images), *ranks), 0, batch_size or task.eval_batch, drops_last=False
    )
    loaded = start_loading(make_loader(images, batches, task.config.workers))
    found: list[tuple[int, Any]] = []
    broken: list[int] = []
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        for batch in tracked(listen, loaded, len(batches), "evaluation"):
            predictions = task.predict(model, batch, accelerator.device)
            pairs = zip(batch.indices, predictions, strict=True)
            found += [(index, each) for index, each in pairs if index not in batch.broken]
            broken += batch.broken
    if ranks[0] > 1:
        found, broken = gather_object(found), gather_object(broken)
    return dict(sorted(found, key=lambda pair: pair[0])), sorted(broken)


def measure_effect_of(task: Task, model: nn.Module, accelerator: Accelerator) -> float | None:
    """Returns how much a run's attention changes without its encoding, on some validation images.

    Returns:
        The mean over the attentions (`irpe.adapters.effect`); `None` without an encoding.
    """
    if task.config.encoding == "none":
        return None
    shape: Any = task.config.input_shape if "size" in task.takes else None
    images = task.open("val", Condition(size=shape and shape[1:]), silent)
    batches = Batches(EveryImage(len(images), 1, 0), 0, min(_MEASURED, len(images)))
    batch = next(iter(make_loader(images, batches, 0)))
    with accelerator.autocast():
        return mean_effect(
            effects_in(model, lambda: task.predict(model, batch, accelerator.device))
        )


def check_broken(broken: Sequence[int], count: int, images: Images, config: Any) -> None:
    """Raises an error if more than a fraction of some images could not be read."""
    if len(broken) > config.max_broken * count:
        files = ", ".join(images.source.filename(index) for index in broken[:8])
        raise UserError(
            f"{len(broken)} of {count} images cannot be read, more than max_broken = "
            f"{config.max_broken}: {files}"
        )


def score_of(task: Task, images: Images, found: dict[int, Any], broken: list[int]) -> Score:
    """Returns the score of what `predict_all` found."""
    if not found:
        raise UserError("no image could be read: nothing to evaluate")
    check_broken(broken, len(found) + len(broken), images, task.config)
    score = task.score(images, found)
    return replace(score, num_images=len(found), num_broken=len(broken))
