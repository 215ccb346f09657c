"""Images shifted by whole patches, and which of them a model still classifies correctly."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from irpe.tasks.classify.transforms import LabelledImages
from irpe.train.sampling import every_batch

_BATCH = 256  # images per forward pass
_DIRECTIONS = ((0, 1), (1, 0), (0, -1), (-1, 0))  # right, down, left, up

Images = Float[Tensor, "image channel row column"]


def shift_images(images: Images, distance: int, black: Float[Tensor, " channel"]) -> Images:
    """Returns images shifted by some pixels: right, down, left and up in turn.

    Args:
        images: The images.
        distance: How many pixels.
        black: What comes into view, a value for each channel.
    """
    shifted = black.to(images).view(-1, 1, 1).expand_as(images).contiguous()
    height, width = images.shape[-2:]
    for first, direction in enumerate(_DIRECTIONS):
        down, right = (distance * step for step in direction)
        target = shifted[first :: len(_DIRECTIONS)]
        source = images[first :: len(_DIRECTIONS)]
        target[..., _inside(down, height), _inside(right, width)] = source[
            ..., _inside(-down, height), _inside(-right, width)
        ]
    return shifted


def classify_shifted(
    model: nn.Module,
    images: LabelledImages,
    shifts: Sequence[int],
    accelerator: Accelerator,
    workers: int = 0,
) -> list[tuple[bool, ...]]:
    """Returns, for each shift, whether each readable image is classified correctly.

    Args:
        model: The model, in eval mode, on the accelerator's device.
        images: The images, with their labels.
        shifts: How far the images are shifted, in patches.
        accelerator: Knows the device.
        workers: Processes that load images.
    """
    device, patch = accelerator.device, patch_size(model)
    black = images.transform(Image.new(images.mode, (8, 8)))[:, 0, 0]
    correct: list[list[bool]] = [[] for _ in shifts]
    with torch.no_grad(), accelerator.autocast():
        for batch in every_batch(images, _BATCH, workers):
            readable = ~batch.broken
            pixels, labels = batch.images[readable].to(device), batch.labels[readable].to(device)
            for found, shift in zip(correct, shifts, strict=True):
                logits = model(shift_images(pixels, shift * patch, black))
                found += (logits.argmax(1) == labels).tolist()
    return [tuple(found) for found in correct]


def patch_size(model: nn.Module) -> int:
    """Returns the side of a patch of timm's ViT or Swin, in pixels."""
    embedding: Any = model.get_submodule("patch_embed")
    return embedding.patch_size[0]


def _inside(offset: int, size: int) -> slice:
    """Returns where an axis is still covered after a shift."""
    return slice(max(offset, 0), size + min(offset, 0))
