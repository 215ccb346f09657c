"""Cross-entropy over pixels, and intersection over union of predicted and true classes.

The loss is the same however a batch is split. Each image counts once in a score: all scores follow
from the pixels of each class in each image: those that are of it, those that were predicted as it,
and those that are both.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from irpe.errors import UserError
from irpe.tasks.segment.labels import IGNORED
from irpe.train.task import Measure, Score

MEASURES = (
    Measure("mIoU", "mIoU", "%"),
    Measure("pixel_accuracy", "pixel accuracy", "%", brief=False),
    Measure("class_accuracy", "class accuracy", "%", brief=False),
)


class ClassCounts(NamedTuple):
    """Pixels of each class in an image, enough for its intersections and unions."""

    correct: tuple[int, ...]
    true: tuple[int, ...]
    predicted: tuple[int, ...]


def count_classes(
    labels: UInt8[Tensor, "row column"], predicted: UInt8[Tensor, "row column"], num_classes: int
) -> ClassCounts:
    """Returns the pixels of each class in an image."""
    is_scored = labels != IGNORED
    true, found = labels[is_scored].long(), predicted[is_scored].long()
    each = (true[true == found], true, found)
    return ClassCounts(*(tuple(torch.bincount(x, minlength=num_classes).tolist()) for x in each))


def score_pixels(images: Sequence[ClassCounts], classes: Sequence[str]) -> Score:
    """Returns the score of some images, in percent; NaN for classes that do not occur.

    The value of an image is its pseudovalue in the jackknife: mIoU is not a mean over images.
    """
    counts = torch.tensor(images, dtype=torch.float64)
    total = counts.sum(0)
    correct, true, predicted = total
    if not true.sum():
        raise UserError("no pixel has a class: nothing to evaluate")
    iou, accuracy = 100 * (correct / (true + predicted - correct)), 100 * correct / true
    without = _miou(total - counts)
    values = _miou(total) + (len(counts) - 1) * (without.mean() - without)
    details = {
        "mIoU": _mean(iou.tolist()),
        "pixel_accuracy": 100 * int(correct.sum()) / int(true.sum()),
        "class_accuracy": _mean(accuracy.tolist()),
    }
    by_class: Mapping[str, float] = dict(zip(classes, iou.tolist(), strict=True))
    constant = 100 * float(true.max() / true.sum()) / int((true > 0).sum())
    return Score(MEASURES, details, tuple(values.tolist()), by_class, constant)


def _miou(counts: Float[Tensor, "... kind class"]) -> Float[Tensor, "..."]:
    correct, true, predicted = counts.unbind(-2)
    return 100 * (correct / (true + predicted - correct)).nanmean(-1)


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known)


def count_pixels(labels: Sequence[UInt8[Tensor, "row column"]]) -> int:
    """Returns the number of pixels that have a class."""
    return sum(int((each != IGNORED).sum()) for each in labels)


def pixel_loss(
    scores: Float[Tensor, "image class row column"],
    labels: UInt8[Tensor, "image row column"],
    num_pixels: float,
) -> Tensor:
    """Returns the summed cross-entropy of a micro-batch over a number of pixels.

    A mean over each micro-batch would weigh pixels by how many others of it have a class. Divided
    by the pixels of the whole step per micro-batch, the mean over micro-batches and processes is
    the loss of the batch on one device.

    Args:
        scores: The class scores.
        labels: The true classes, or `IGNORED`.
        num_pixels: What the sum is divided by.
    """
    total = functional.cross_entropy(
        scores.float(), labels.long(), ignore_index=IGNORED, reduction="sum"
    )
    return total / num_pixels
