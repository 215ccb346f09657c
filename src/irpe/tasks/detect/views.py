"""Images with boxes as a detector gets them, and batches of them.

Sizes and crops are those of DETR: the short side takes one of several lengths, the long side stays
below a limit, and half of the images are cropped before. torchvision's own classes for that
(`RandomShortestSize`, `RandomChoice`, ...) draw other random numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset
from torchvision.ops import box_convert
from torchvision.transforms.v2 import functional as F  # noqa: N812, its usual name
from torchvision.tv_tensors import BoundingBoxes, BoundingBoxFormat

from irpe.tasks.detect.boxes import BoxSource, Target
from irpe.train.images import read_or_next
from irpe.train.processes import Sample, seeded

Item = tuple[Tensor, Target, int, bool]
_BEFORE_CROP = (400, 500, 600)  # short sides before a crop
_CROP = 384, 600  # shortest and longest side of a crop


class BoxBatch(NamedTuple):
    """What a detector and its loss get.

    Args:
        inputs: The images or feature maps, padded with zeros to the right and below to the size of
            the largest.
        mask: True inside an image, false on its padding.
        boxes: For each image its boxes: centre x, centre y, width and height, relative to it.
        labels: For each image the classes of its boxes.
        indices: The indices of the images in the source.
        broken: The indices of those that another image replaces, as they could not be read.
    """

    inputs: Tensor
    mask: Tensor
    boxes: list[Tensor]
    labels: list[Tensor]
    indices: list[int]
    broken: list[int]


@dataclass(frozen=True)
class Views:
    """How images are flipped, cropped, resized and normalized for a detector.

    Args:
        short_sides: Lengths of the short side, one of which is drawn.
        longest: The longest long side; the short side gets shorter where it would be exceeded.
        flip: The probability of a horizontal flip.
        crop: Crop half of the images at random before resizing.
        mean: The mean of each colour, whose values are between 0 and 1.
        std: The standard deviation of each colour.
    """

    short_sides: tuple[int, ...]
    longest: int
    flip: float
    crop: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __call__(self, image: Image.Image, target: Target) -> tuple[Tensor, Target]:
        """Returns a view of an image, and its boxes in pixels of the view.

        Boxes are clipped to the view; those outside it are removed.
        """
        pixels: Tensor = F.pil_to_tensor(image)
        boxes: Any = BoundingBoxes(  # pyright: ignore[reportCallIssue]
            target.boxes, format=BoundingBoxFormat.XYXY, canvas_size=_size(pixels)
        )
        if self.flip and torch.rand(()) < self.flip:
            pixels, boxes = F.horizontal_flip(pixels), F.horizontal_flip(boxes)
        if self.crop and torch.rand(()) < 0.5:
            pixels, boxes = _resize(pixels, boxes, _pick(_BEFORE_CROP), None)
            pixels, boxes = random_crop(pixels, boxes)
        pixels, boxes = _resize(pixels, boxes, _pick(self.short_sides), self.longest)
        pixels = F.to_dtype(pixels, torch.float32, scale=True)
        pixels = F.normalize(pixels, list(self.mean), list(self.std))
        corners = boxes.as_subclass(Tensor)
        inside = (corners[:, :2] < corners[:, 2:]).all(1)
        return pixels, Target(corners[inside], target.labels[inside])


class BoxImages(Dataset[Any]):
    """Images of a source as tensors, with their boxes."""

    def __init__(
        self, source: BoxSource, views: Views, seed: int | None, split: tuple[str, str] = ("", "")
    ) -> None:
        self.source, self.views, self.seed, self.split = source, views, seed, split

    @property
    def facts(self) -> dict[str, Any]:
        """Which images they are."""
        return {"split": self.split[0], "num_dropped": self.source.num_dropped}

    @property
    def notes(self) -> tuple[str, ...]:
        """How many invalid boxes were left out."""
        count = self.source.num_dropped
        return (f"{self.split[0]}: {count} invalid boxes are left out",) if count else ()

    def __str__(self) -> str:
        count = self.source.num_dropped
        dropped = f" without {count} invalid boxes" if count else ""
        return f"{self.split[1]}, {self.split[0]}{dropped}"

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, sample: Sample) -> Item:
        (image, target), is_broken = read_or_next(self.source.read, sample.image, len(self.source))
        if self.seed is None:
            return *self.views(image, target), sample.image, is_broken
        with seeded(self.seed, sample.epoch, sample.position):
            return *self.views(image, target), sample.image, is_broken

    @staticmethod
    def collate(items: Sequence[Item]) -> BoxBatch:
        """Returns some images, or feature maps, as a batch."""
        inputs, targets, indices, broken = (list(column) for column in zip(*items, strict=True))
        sizes = [_size(tensor) for tensor in inputs]
        height, width = (max(sides) for sides in zip(*sizes, strict=True))
        padding = [(0, width - w, 0, height - h) for h, w in sizes]
        masks = [torch.ones(size, dtype=torch.bool) for size in sizes]
        return BoxBatch(
            torch.stack([pad(tensor, by) for tensor, by in zip(inputs, padding, strict=True)]),
            torch.stack([pad(mask, by) for mask, by in zip(masks, padding, strict=True)]),
            [relative_boxes(t.boxes, size) for t, size in zip(targets, sizes, strict=True)],
            [target.labels for target in targets],
            indices,
            [index for index, is_lost in zip(indices, broken, strict=True) if is_lost],
        )


def view_size(size: tuple[int, int], short: int, longest: int | None) -> tuple[int, int]:
    """Returns the height and width of an image once its short side has a length, as in DETR."""
    low, high = sorted(size)
    if longest is not None and high / low * short > longest:
        short = max(1, round(longest * low / high))
    long = int(short * high / low)
    if longest is not None:
        long = min(long, longest)
    return (short, long) if size[0] <= size[1] else (long, short)


def relative_boxes(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns boxes x1 y1 x2 y2 as centres and sizes, relative to a height and width."""
    height, width = size
    return box_convert(boxes, "xyxy", "cxcywh") / boxes.new_tensor([width, height, width, height])


def random_crop(pixels: Tensor, boxes: Any) -> tuple[Tensor, Any]:
    """Returns a random crop of an image whose short side is at least that of the smallest crop."""
    height, width = _size(pixels)
    h, w = (_between(_CROP[0], min(side, _CROP[1])) for side in (height, width))
    where = _between(0, height - h), _between(0, width - w), h, w
    return F.crop(pixels, *where), F.crop(boxes, *where)


def _size(pixels: Tensor) -> tuple[int, int]:
    return pixels.shape[-2], pixels.shape[-1]


def _pick(lengths: Sequence[int]) -> int:
    if len(lengths) == 1:
        return lengths[0]
    return lengths[int(torch.randint(len(lengths), ()))]


def _between(low: int, high: int) -> int:
    return int(torch.randint(low, high + 1, ()))


def _resize(pixels: Tensor, boxes: Any, short: int, longest: int | None) -> tuple[Tensor, Any]:
    size = list(view_size(_size(pixels), short, longest))
    return F.resize(pixels, size, antialias=True), F.resize(boxes, size)
