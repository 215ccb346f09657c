"""Intersection over union of predicted and true classes; each image counts once.

All scores follow from the confusion matrix over all pixels of all images, summed over processes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float, Int64, UInt8
from torch import Tensor, nn

from irpe.errors import UserError
from irpe.progress import NO_PROGRESS, Progress
from irpe.tasks.segment.crops import PixelImages
from irpe.tasks.segment.labels.listing import IGNORED
from irpe.tasks.segment.windows import Windows, class_scores
from irpe.train.sampling import every_batch

EVAL_BATCH = 8  # images per forward pass in evaluation

Confusion = Int64[Tensor, "truth predicted"]


class ClassCounts(NamedTuple):
    """Pixels of each class in an image, enough for its intersections and unions.

    Args:
        correct: Pixels of the class that were predicted as such.
        true: Pixels of the class.
        predicted: Pixels that were predicted as the class.
    """

    correct: tuple[int, ...]
    true: tuple[int, ...]
    predicted: tuple[int, ...]


@dataclass(frozen=True)
class PixelScore:
    """How well a model segments, in percent; NaN for classes that are neither true nor predicted.

    Args:
        iou: Intersection over union of each class.
        accuracy: Percent of the pixels of each class that were predicted as such.
        pixel_accuracy: Percent of all pixels whose class was predicted.
        images: The pixels of each class in each image, in the order of the source.
    """

    iou: tuple[float, ...]
    accuracy: tuple[float, ...]
    pixel_accuracy: float
    images: tuple[ClassCounts, ...]

    @property
    def miou(self) -> float:
        """The mean intersection over union of the classes that are true or predicted."""
        return _mean(self.iou)

    @property
    def class_accuracy(self) -> float:
        """The mean accuracy of the classes that occur."""
        return _mean(self.accuracy)

    @property
    def num_images(self) -> int:
        """The images that count."""
        return len(self.images)

    def row(self) -> dict[str, float]:
        """Returns the columns of the run's table."""
        return {
            "mIoU": self.miou,
            "pixel_accuracy": self.pixel_accuracy,
            "class_accuracy": self.class_accuracy,
        }


def evaluate(
    model: nn.Module,
    images: PixelImages,
    accelerator: Accelerator,
    windows: Windows | None = None,
    batch_size: int = EVAL_BATCH,
    workers: int = 0,
    progress: Progress = NO_PROGRESS,
) -> PixelScore:
    """Returns the score of a model on images; the model is in eval mode afterwards.

    Args:
        model: The model, on the accelerator's device.
        images: The images, with their label maps.
        accelerator: Knows the processes and the device.
        windows: Sliding windows; `None` for whole images.
        batch_size: Images per forward pass.
        workers: Processes that load images.
        progress: Is told how far it is.
    """
    count, device = len(images.source.classes), accelerator.device
    ranks = accelerator.num_processes, accelerator.process_index
    confusion = torch.zeros(count, count, dtype=torch.int64)
    found: list[tuple[int, ClassCounts]] = []
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        for batch in every_batch(images, batch_size, workers, *ranks, progress):
            predictions = predict(model, batch.images, batch.labels, device, windows)
            for labels, predicted, index in zip(
                batch.labels, predictions, batch.indices, strict=True
            ):
                of_image = confusion_matrix(labels, predicted, count)
                confusion += of_image
                found.append((index, _counts(of_image)))
    if accelerator.num_processes > 1:
        found = gather_object(found)
        total: Any = accelerator.reduce(confusion.to(device), "sum")
        confusion = total.cpu()
    return score_pixels(confusion, [counts for _, counts in sorted(found)])


def predict(
    model: nn.Module,
    images: Sequence[Tensor],
    labels: Sequence[Tensor],
    device: torch.device,
    windows: Windows | None,
) -> list[UInt8[Tensor, "row column"]]:
    """Returns the class of each pixel of images, in the size of their label maps.

    Args:
        model: The model, in eval mode.
        images: The images; those of one size share a forward pass.
        labels: Their label maps, whose sizes are taken.
        device: Where the model is.
        windows: Sliding windows; `None` for whole images.
    """
    is_one_size = len({image.shape for image in images}) == 1
    stacks = [torch.stack(list(images))] if is_one_size else [image[None] for image in images]
    scores = [s for stack in stacks for s in class_scores(model, stack.to(device), windows)]
    return [
        _resize(of_image, label.shape).argmax(0).to(torch.uint8).cpu()
        for of_image, label in zip(scores, labels, strict=True)
    ]


def confusion_matrix(
    labels: UInt8[Tensor, "row column"], predicted: UInt8[Tensor, "row column"], num_classes: int
) -> Confusion:
    """Returns how many pixels of each true class were predicted as each class.

    Args:
        labels: The true classes; `IGNORED` ones do not count.
        predicted: The predicted classes.
        num_classes: The number of classes.
    """
    is_scored = labels != IGNORED
    pairs = labels[is_scored].long() * num_classes + predicted[is_scored].long()
    return torch.bincount(pairs, minlength=num_classes**2).view(num_classes, num_classes)


def score_pixels(confusion: Confusion, images: Sequence[ClassCounts]) -> PixelScore:
    """Returns the score of a confusion matrix.

    Args:
        confusion: The pixels of all images.
        images: Those of each image.
    """
    if not confusion.sum():
        raise UserError("no pixel has a class: nothing to evaluate")
    correct, true, predicted = (torch.tensor(counts) for counts in _counts(confusion))
    return PixelScore(
        iou=tuple((100 * _iou(correct, true, predicted)).tolist()),
        accuracy=tuple((100 * correct.double() / true).tolist()),
        pixel_accuracy=100 * int(correct.sum()) / int(confusion.sum()),
        images=tuple(images),
    )


def _iou(correct: Tensor, true: Tensor, predicted: Tensor) -> Float[Tensor, " class"]:
    return correct.double() / (true + predicted - correct)


def _counts(confusion: Confusion) -> ClassCounts:
    sums = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    return ClassCounts(*(tuple(each.tolist()) for each in sums))


def _resize(scores: Tensor, size: Sequence[int]) -> Tensor:
    if scores.shape[-2:] == torch.Size(size):
        return scores
    return nn.functional.interpolate(scores[None], size=tuple(size), mode="bilinear")[0]


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known)
