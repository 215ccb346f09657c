"""Class scores of images of any size: of a whole image, or the mean of sliding windows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from irpe.tasks.segment.config import SegmenterConfig


@dataclass(frozen=True)
class Windows:
    """Windows that slide over an image."""

    size: tuple[int, int]
    stride: tuple[int, int]

    def starts(self, length: int, axis: int) -> list[int]:
        """Returns where windows begin on an axis: the last one ends where the image does."""
        last = max(length - self.size[axis], 0)
        return [*range(0, last, self.stride[axis]), last]


def windows_of(config: SegmenterConfig) -> Windows:
    """Returns the sliding windows of a configuration: as large as a crop in training."""
    size = config.crop_height, config.crop_width
    rows, columns = (config.stride or max(1, round(2 * side / 3)) for side in size)
    return Windows(size, (rows, columns))


def class_scores(
    model: nn.Module, images: Float[Tensor, "image channel row column"], windows: Windows | None
) -> Float[Tensor, "image class row column"]:
    """Returns the class scores of each pixel.

    Args:
        model: The model.
        images: Images of one size.
        windows: Sliding windows, whose scores are averaged where they overlap; `None` for whole
            images.
    """
    if windows is None:
        return model(images)
    height, width = images.shape[-2:]
    total: Any = None
    count = torch.zeros(height, width, device=images.device)
    for top in windows.starts(height, 0):
        for left in windows.starts(width, 1):
            inside = slice(top, top + windows.size[0]), slice(left, left + windows.size[1])
            scores = model(images[..., *inside])
            if total is None:
                total = scores.new_zeros(*scores.shape[:2], height, width)
            total[..., *inside] += scores
            count[inside] += 1
    return total / count


def score_padded(
    images: Float[Tensor, "image channel row column"],
    stride: int,
    score: Callable[[Tensor], Tensor],
) -> Float[Tensor, "image class row column"]:
    """Returns the class scores of each pixel; images are padded to the right and below."""
    rows, columns = images.shape[-2:]
    padding = (0, -columns % stride, 0, -rows % stride)
    padded = functional.pad(images, padding) if any(padding) else images
    scores = score(padded).float()
    scores = functional.interpolate(scores, size=padded.shape[-2:], mode="bilinear")
    return scores[..., :rows, :columns]
