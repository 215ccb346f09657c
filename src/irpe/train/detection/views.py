"""Images with boxes as a detector sees them, and batches of them.

Sizes and crops are those of DETR: the short side takes one of several lengths, the long side stays
below a limit, and half of the images are cropped before.
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

from irpe.train.detection.annotations.source import BoxSource, Target
from irpe.train.sampling import Draw, seeded

Item = tuple[Tensor, Target, int]
_BEFORE_CROP = (400, 500, 600)
_CROP = 384, 600


class BoxBatch(NamedTuple):
    """What a detector and its loss see.

    Args:
        pixels: The images, with zeros to the right and below up to the size of the largest.
        mask: True where there is an image.
        boxes: For each image a row for each box: centre x, centre y, width and height in parts of
            the image.
        labels: For each image the classes of its boxes.
        numbers: The numbers of the images in the source.
    """

    pixels: Tensor
    mask: Tensor
    boxes: list[Tensor]
    labels: list[Tensor]
    numbers: list[int]


@dataclass(frozen=True)
class Views:
    """How images are shown to a detector.

    Args:
        short_sides: Lengths of the short side, one of which is chosen.
        longest: The long side at most; the short one gets shorter where it would be passed.
        flip: The probability of swapping left and right.
        crop: Cut a part out of half of the images first.
        mean: What is taken off the colours, which go from 0 to 1.
        std: What they are divided by then.
    """

    short_sides: tuple[int, ...]
    longest: int
    flip: float
    crop: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        if not self.short_sides or min(*self.short_sides, self.longest) < 1:
            raise ValueError(
                f"short_sides = {self.short_sides}, longest = {self.longest}: at least one length "
                "is needed, and all must be positive"
            )
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip = {self.flip} is no probability from 0 to 1")
        if min(self.std) <= 0:
            raise ValueError(f"std = {self.std} must be positive: colours are divided by it")

    @property
    def is_random(self) -> bool:
        """Whether two views of an image may differ."""
        return len(self.short_sides) > 1 or self.flip > 0 or self.crop

    def __call__(self, image: Image.Image, target: Target) -> tuple[Tensor, Target]:
        """Returns a view of an image, and its boxes in pixels of the view.

        Boxes are cut where the view ends; those of which nothing is left are gone.
        """
        pixels: Tensor = F.pil_to_tensor(image)
        boxes: Any = BoundingBoxes(  # pyright: ignore[reportCallIssue]
            target.boxes, format=BoundingBoxFormat.XYXY, canvas_size=_size(pixels)
        )
        if self.flip and torch.rand(()) < self.flip:
            pixels, boxes = F.horizontal_flip(pixels), F.horizontal_flip(boxes)
        if self.crop and torch.rand(()) < 0.5:
            pixels, boxes = _resize(pixels, boxes, _pick(_BEFORE_CROP), None)
            pixels, boxes = _crop(pixels, boxes)
        pixels, boxes = _resize(pixels, boxes, _pick(self.short_sides), self.longest)
        pixels = F.to_dtype(pixels, torch.float32, scale=True)
        pixels = F.normalize(pixels, list(self.mean), list(self.std))
        corners = boxes.as_subclass(Tensor)
        left = (corners[:, :2] < corners[:, 2:]).all(1)
        return pixels, Target(corners[left], target.labels[left])


class BoxImages(Dataset[Any]):
    """Images of a source as tensors, with their boxes.

    Args:
        source: The images.
        views: How they are shown.
        seed: The seed of what is random in the views; `None` if nothing is.
    """

    def __init__(self, source: BoxSource, views: Views, seed: int | None) -> None:
        if seed is None and views.is_random:
            raise ValueError(f"{views} is random: give a seed")
        self.source = source
        self.views = views
        self.seed = seed

    def __getitem__(self, draw: Draw) -> Item:
        image, target = self.source.read(draw.number)
        if self.seed is None:
            return *self.views(image, target), draw.number
        with seeded(self.seed, draw.epoch, draw.position):
            return *self.views(image, target), draw.number

    @staticmethod
    def collate(items: Sequence[Item]) -> BoxBatch:
        """Returns some images as a batch."""
        sizes = [_size(pixels) for pixels, _, _ in items]
        height, width = (max(sides) for sides in zip(*sizes, strict=True))
        room = [(0, width - w, 0, height - h) for h, w in sizes]
        return BoxBatch(
            torch.stack([pad(item[0], by) for item, by in zip(items, room, strict=True)]),
            torch.stack(
                [
                    pad(torch.ones(size, dtype=torch.bool), by)
                    for size, by in zip(sizes, room, strict=True)
                ]
            ),
            [in_parts(item[1].boxes, size) for item, size in zip(items, sizes, strict=True)],
            [target.labels for _, target, _ in items],
            [number for _, _, number in items],
        )


def view_size(size: tuple[int, int], short: int, longest: int | None) -> tuple[int, int]:
    """Returns the height and width of an image once its short side has a length, as in DETR.

    Args:
        size: Its height and width.
        short: The length.
        longest: The long side at most; `None` for no limit.
    """
    low, high = sorted(size)
    if longest is not None and high / low * short > longest:
        short = max(1, round(longest * low / high))
    long = int(short * high / low)
    if longest is not None:
        long = min(long, longest)
    return (short, long) if size[0] <= size[1] else (long, short)


def in_parts(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns boxes x1 y1 x2 y2 as centres and sizes, in parts of a height and width."""
    height, width = size
    return box_convert(boxes, "xyxy", "cxcywh") / boxes.new_tensor([width, height, width, height])


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


def _crop(pixels: Tensor, boxes: Any) -> tuple[Tensor, Any]:
    """Returns a part of an image whose short side is as long as the least crop at least."""
    height, width = _size(pixels)
    h, w = (_between(_CROP[0], min(side, _CROP[1])) for side in (height, width))
    where = _between(0, height - h), _between(0, width - w), h, w
    return F.crop(pixels, *where), F.crop(boxes, *where)
