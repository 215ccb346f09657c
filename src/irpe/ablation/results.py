"""What a cell of an ablation found, by task: a score, and its value for each test image."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from irpe.tasks.classify.scores import Score
from irpe.tasks.segment.scores import ClassCounts, PixelScore


@dataclass(frozen=True)
class Measure:
    """How the cells of a task are compared, in percent.

    Args:
        key: The score's name in files.
        name: What to call it.
        second_key: The name in files of another score, which is reported beside it.
        second_name: What to call that one.
        shifts: How far the test images are moved, in patches; 0 is the image as it is.
    """

    key: str
    name: str
    second_key: str
    second_name: str
    shifts: tuple[int, ...]

    @property
    def unmoved(self) -> str:
        """What to call the test images as they are."""
        return "Images as they are" if len(self.shifts) > 1 else f"By {self.name}"


TOP1 = Measure("top1", "top-1", "top5", "top-5", (0, 1, 2))
MIOU = Measure("mIoU", "mIoU", "pixel_accuracy", "pixel accuracy", (0,))
MEASURES = {"classification": TOP1, "segmentation": MIOU}


@dataclass(frozen=True)
class ClassifierResult:
    """What a cell of a classifier found.

    Args:
        row: The name of the row.
        seed: The seed.
        correct: For each shift of the test images: whether each one was classified correctly.
        top5: Percent of the unshifted images with the right class among the first five.
        effect: How much the attention's output changes without the encoding, if any.
    """

    row: str
    seed: int
    correct: tuple[tuple[bool, ...], ...]
    top5: float
    effect: float | None = None

    measure: ClassVar[Measure] = TOP1

    def score(self, shift: int = 0) -> float:
        """Returns the percent of images classified correctly after a shift by some patches."""
        return 100 * sum(self.correct[shift]) / len(self.correct[shift])

    @property
    def second(self) -> float:
        """Top-5."""
        return self.top5

    def values(self, shift: int = 0) -> Float[Tensor, " image"]:
        """Returns values of the images whose mean is the score."""
        return 100 * torch.tensor(self.correct[shift], dtype=torch.float64)


@dataclass(frozen=True)
class SegmenterResult:
    """What a cell of a segmenter found.

    Args:
        row: The name of the row.
        seed: The seed.
        images: The pixels of each class in each test image: correct, true and predicted ones.
        effect: How much the attention's output changes without the encoding, if any.
    """

    row: str
    seed: int
    images: tuple[ClassCounts, ...]
    effect: float | None = None

    measure: ClassVar[Measure] = MIOU

    def score(self, shift: int = 0) -> float:
        """Returns the mean intersection over union, in percent; images are not shifted."""
        return float(_miou(self._counts().sum(0)))

    @property
    def second(self) -> float:
        """The percent of pixels whose class was predicted."""
        correct, true, _ = self._counts().sum((0, 2)).tolist()
        return 100 * correct / true

    def values(self, shift: int = 0) -> Float[Tensor, " image"]:
        """Returns values of the images whose mean is the score.

        A mean intersection over union is not a mean over images. The jackknife makes it one: the
        value of an image is the score, plus how much that score falls without the image times the
        number of the others. The standard error of these values is the jackknife's.
        """
        counts = self._counts()
        without = _miou(counts.sum(0) - counts)
        return self.score() + (len(counts) - 1) * (without.mean() - without)

    def _counts(self) -> Float[Tensor, "image 3 class"]:
        return torch.tensor(self.images, dtype=torch.float64)


CellResult = ClassifierResult | SegmenterResult


def make_result(
    row: str,
    seed: int,
    score: Score | PixelScore,
    shifted: list[tuple[bool, ...]],
    effect: float | None,
) -> CellResult:
    """Returns the result of a cell.

    Args:
        row: The name of the row.
        seed: The seed.
        score: The score of its model.
        shifted: For a classifier: whether each image was classified correctly, by shift.
        effect: How much the attention's output changes without the encoding.
    """
    if isinstance(score, PixelScore):
        return SegmenterResult(row, seed, score.images, effect)
    return ClassifierResult(row, seed, (score.correct, *shifted), score.top5, effect)


def parse_result(content: dict[str, Any], row: str) -> CellResult:
    """Returns the result in the fields of a file.

    Args:
        content: The fields.
        row: The name of the row.
    """
    fields = {**content, "row": row}
    fields: dict[str, Any] = {**content, "row": row}
    if "images" in content:
        fields["images"] = tuple(ClassCounts(*map(tuple, image)) for image in content["images"])
        return SegmenterResult(**fields)
    fields["correct"] = tuple(tuple(map(bool, of_shift)) for of_shift in content["correct"])
    return ClassifierResult(**fields)


def _miou(counts: Float[Tensor, "*image 3 class"]) -> Float[Tensor, "*image"]:
    """Returns the mean over the classes that are true or predicted, in percent."""
    correct, true, predicted = counts.unbind(-2)
    return 100 * (correct / (true + predicted - correct)).nanmean(-1)
