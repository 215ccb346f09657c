"""Images shifted by whole patches, and which of them a model still classifies correctly."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float, Int64
from PIL import Image
from torch import Tensor, nn

from irpe.tasks.classify.transforms import LabelledImages
from irpe.train.sampling import every_batch

_BATCH = 256  # images per forward pass
_DIRECTIONS = ((0, 1), (1, 0), (0, -1), (-1, 0))  # right, down, left, up

Images = Float[Tensor, "image channel row column"]


def shift_images(
    images: Images, distance: int, black: Float[Tensor, " channel"] | None = None
) -> Images:
    """Returns images shifted by some pixels: right, down, left and up in turn.

    Args:
        images: The images.
        distance: How many pixels.
        black: What comes into view, a value for each channel; `None`: the image reflected at its
            border.
    """
    shifted = torch.empty_like(images)
    for first, direction in enumerate(_DIRECTIONS):
        source = images[first :: len(_DIRECTIONS)]
        for axis, step, size in zip((2, 3), direction, images.shape[2:], strict=True):
            at = torch.arange(size, device=images.device) - distance * step
            source = source.index_select(axis, _reflect(at, size))
            if black is not None:
                outside = ((at < 0) | (at >= size)).unflatten(0, (-1, 1) if axis == 2 else (1, -1))
                source = torch.where(outside, black.to(source).view(-1, 1, 1), source)
        shifted[first :: len(_DIRECTIONS)] = source
    return shifted


def classify_shifted(
    model: nn.Module,
    images: LabelledImages,
    shifts: Sequence[int],
    accelerator: Accelerator,
    workers: int = 0,
) -> list[tuple[bool, ...]]:
    """Returns, for each shift, whether each readable image is classified correctly.

    Grey images leave black where they were: their objects mostly lie on it. Images with colours are
    reflected at the border, for black there costs a model even if it cannot see position.

    Args:
        model: The model, in eval mode, on the accelerator's device.
        images: The images, with their labels.
        shifts: How far the images are shifted, in patches.
        accelerator: Knows the device.
        workers: Processes that load images.
    """
    device, patch = accelerator.device, patch_size(model)
    is_grey = images.mode != "RGB"
    black = images.transform(Image.new(images.mode, (8, 8)))[:, 0, 0] if is_grey else None
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


def _reflect(at: Int64[Tensor, " place"], size: int) -> Int64[Tensor, " place"]:
    """Returns where an axis that is reflected at both ends has its values."""
    period = max(2 * (size - 1), 1)
    return (at % period - (size - 1)).abs().neg() + (size - 1)
