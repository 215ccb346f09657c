"""Trained classifiers on images unlike those they were trained on: of other sizes, and shifted."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from torch import nn

from irpe.ablation.shifts import classify_shifted, patch_size
from irpe.errors import UserError
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.model import build_model
from irpe.tasks.classify.scores import check_broken, evaluate
from irpe.tasks.classify.sources import Source
from irpe.tasks.classify.transforms import eval_images
from irpe.train.config import RunConfig
from irpe.train.configs import KINDS
from irpe.train.runs import load_run, read_config
from irpe.train.weights import start_from

_SCALES = tuple(Fraction(scale) for scale in ("3/4", "7/8", "1", "5/4", "3/2"))

Axis = Literal["size", "move"]
Curves = dict[str, dict[int, list[float]]]
C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True)
class EvaluatedRun:
    """A run to evaluate.

    Args:
        path: Its directory.
        config: Its configuration.
        source: The images to evaluate on.
    """

    path: Path
    config: ClassifierConfig
    source: Source


class Point(NamedTuple):
    """A run's score under one condition.

    Args:
        run: The index of the run.
        axis: What was changed: the size of the input, or the position of the image.
        at: The size in pixels, or the shift in patches.
        top1: Percent of the images classified correctly.
    """

    run: int
    axis: Axis
    at: int
    top1: float


def read_classifier(path: Path) -> ClassifierConfig:
    """Returns the configuration of a classifier's run."""
    return read_as(path, ClassifierConfig)


def read_as(path: Path, kind: type[C]) -> C:
    """Returns the configuration of a run, or raises an error if it is of another task.

    Args:
        path: The run's directory.
        kind: The task's configuration.
    """
    config = read_config(path)
    if not isinstance(config, kind):
        found, wanted = KINDS[config.task], KINDS[kind.task]
        raise UserError(f"{path} is the run of a {found}: pass runs of {wanted}s")
    return config


def group_runs(configs: Sequence[RunConfig]) -> list[int]:
    """Returns the index of each run's group: runs that differ in the seed alone form a group.

    Args:
        configs: The configurations of the runs.
    """
    keys = [config.replace(seed=0).to_json() for config in configs]
    groups = {key: group for group, key in enumerate(dict.fromkeys(keys))}
    return [groups[key] for key in keys]


def name_groups(
    runs: Sequence[Path],
    labels: Sequence[str],
    read: Callable[[Path], RunConfig] = read_classifier,
) -> list[str]:
    """Returns the label of each run, which is the label of its group.

    Args:
        runs: The directories of the runs.
        labels: A name for each group, in the order of their first runs; empty: names made from
            the encodings.
        read: Returns the configuration of a run.
    """
    configs = [read(path) for path in runs]
    groups = group_runs(configs)
    first = [groups.index(group) for group in range(max(groups) + 1)]
    if labels and len(labels) != len(first):
        raise UserError(
            f"{len(labels)} labels for {len(first)} groups of runs (runs that differ in the seed "
            "alone are a group): give one label for each, in the order of "
            f"{', '.join(str(runs[index]) for index in first)}"
        )
    names = list(labels) or [label_encodings(configs[n], load_run(runs[n])) for n in first]
    for group, name in enumerate(names):
        other = names.index(name)
        if other < group:
            fields = _differences(configs[first[other]], configs[first[group]])
            raise UserError(
                f"two groups of runs are called {name!r}, and differ in {', '.join(fields)}: give "
                f"each of the {len(first)} groups a label of its own"
            )
    return [names[group] for group in groups]


def label_encodings(config: RunConfig, model: nn.Module) -> str:
    """Returns a short name for the encodings of a run, such as "absolute + K".

    Args:
        config: The run's configuration.
        model: The run's model.
    """
    keys = list(model.state_dict())
    parts: list[str] = []
    if config.absolute == "sinusoid":
        parts.append("sinusoid")
    elif any(key.split(".")[-1] == "pos_embed" for key in keys):
        parts.append("absolute")
    if any(key.endswith("relative_position_bias_table") for key in keys):
        parts.append("built-in bias")
    if config.encoding != "none":
        usual = re.fullmatch("product-contextual-([qkv]+)", config.encoding)
        parts.append(usual[1].upper() if usual else config.encoding)
    return " + ".join(parts) or "none"


def default_sizes(config: ClassifierConfig, model: nn.Module) -> list[int]:
    """Returns sizes from three quarters to one and a half of a run's own, in whole patches."""
    patch = patch_size(model)
    patches = Fraction(config.image_size, patch)
    return sorted({max(1, round(patches * scale)) * patch for scale in _SCALES})


def check_conditions(
    path: Path,
    config: ClassifierConfig,
    model: nn.Module,
    sizes: Sequence[int],
    moves: Sequence[int],
) -> None:
    """Raises an error if a run cannot be evaluated at these sizes and moves.

    Args:
        path: The run's directory.
        config: Its configuration.
        model: Its model.
        sizes: Heights and widths of the input, in pixels.
        moves: How far images are shifted, in patches.
    """
    patch = patch_size(model)
    most = config.image_size // patch - 1
    for move in moves:
        if not 0 <= move <= most:
            raise UserError(
                f"{path}: a move by {move} patches leaves nothing of an image of "
                f"{config.image_size} pixels in view: choose 0 to {most}"
            )
    for size in sizes:
        if size < patch or size % patch:
            near = max(1, size // patch) * patch
            raise UserError(
                f"{path}: size {size} is not a multiple of {patch}, the side of a patch: choose "
                f"{near} or {near + patch}"
            )
        try:
            with torch.no_grad():  # a grid larger than the tables shows on an image
                resize(model, config, size)(torch.zeros(1, config.channels, size, size))
        except ValueError as error:
            raise UserError(f"{path} cannot be evaluated at size {size}: {error}") from error


def resize(model: nn.Module, config: ClassifierConfig, size: int) -> nn.Module:
    """Returns the model of a run, built again for images of another size, in eval mode.

    The learned absolute encoding is resampled, a sinusoid is that of the new grid, and all other
    weights, tables and the last layer among them, are the same.

    Args:
        model: The model.
        config: The configuration of the run.
        size: The height and width of the input.
    """
    whole: Any = model
    other = build_model(config.replace(image_size=size, initial=None), whole.num_classes)
    start_from(other, model.state_dict(), "the run")
    return other.eval()


def measure(
    runs: Sequence[EvaluatedRun],
    sizes: Sequence[int],
    moves: Sequence[int],
    accelerator: Accelerator,
) -> Iterator[Point]:
    """Yields the scores of all runs, at all sizes and then all moves, as they are found.

    Args:
        runs: The runs.
        sizes: Heights and widths of the input, in pixels.
        moves: How far images are shifted, in patches, at the run's own size.
        accelerator: Knows the device.
    """
    if accelerator.num_processes > 1:
        raise UserError("robustness is measured in one process: start it without torchrun")
    for index, run in enumerate(runs):
        model = load_run(run.path)
        for size in sizes:
            yield Point(index, "size", size, _top1_at(run, model, size, accelerator))
        images = eval_images(run.source, run.config)
        model = model.to(accelerator.device)
        found = classify_shifted(model, images, moves, accelerator, run.config.workers)
        for move, correct in zip(moves, found, strict=True):
            yield Point(index, "move", move, 100 * sum(correct) / len(correct))


def collect(points: Iterable[Point], axis: Axis, labels: Sequence[str]) -> Curves:
    """Returns the scores by the label of the group, then by the condition, in the order of runs.

    Args:
        points: The scores.
        axis: Which of them.
        labels: The label of each run.
    """
    curves: Curves = {label: {} for label in labels}
    for point in points:
        if point.axis == axis:
            curves[labels[point.run]].setdefault(point.at, []).append(point.top1)
    return curves


def _top1_at(run: EvaluatedRun, model: nn.Module, size: int, accelerator: Accelerator) -> float:
    resized = resize(model, run.config, size).to(accelerator.device)
    images = eval_images(run.source, run.config.replace(image_size=size))
    score = evaluate(resized, images, accelerator, workers=run.config.workers)
    check_broken(score, run.config.max_broken, run.source)
    return score.top1


def _differences(one: RunConfig, other: RunConfig) -> list[str]:
    names = [field.name for field in dataclasses.fields(one) if field.name != "seed"]
    return [name for name in names if getattr(one, name) != getattr(other, name)]
