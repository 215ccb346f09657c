"""Images as Pillow reads them: what a broken file raises, colours, and their normalization."""

import os
import stat
import struct
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from irpe.errors import UserError, did_you_mean

T = TypeVar("T")
CACHE_BYTES = 2**28  # images that take less than this together are cached in memory

_GREYISH = 16  # of 256 values by which the channels of a grey image may differ

# What Pillow raises for a file that is not an image, or is cut off.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)


class BrokenImageError(UserError):
    """An image that cannot be read."""


def check_regular(path: str | os.PathLike[str]) -> None:
    """Raises an error for a FIFO, a socket or a device, which reading could wait for forever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UserError(f"{path} is not a regular file, but a folder, FIFO, socket or device")


def read_or_next(read: Callable[[int], T], index: int, count: int) -> tuple[T, bool]:
    """Returns an image, or the next one that can be read, and whether it is another one.

    Args:
        read: Returns an image by its index.
        index: The index of the image.
        count: How many there are.
    """
    for other in range(index, index + count):
        try:
            return read(other % count), other != index
        except BrokenImageError:
            continue
    raise UserError(f"none of the {count} images can be read")


def has_colours(image: Any) -> bool:
    """Returns whether a Pillow image shows colours; a grey one may be stored in a mode with them.

    Args:
        image: The image; small differences between its channels are those of its compression.
    """
    small = convert_mode(image, "RGB").resize((16, 16))
    return int(np.ptp(np.asarray(small).astype(int), axis=2).max()) > _GREYISH


def convert_mode(image: Any, mode: str) -> Any:
    """Returns a Pillow image in another mode, "RGB" or "L".

    Images of 16 or 32 bits per pixel are scaled to 8 first, where Pillow would clip them.
    """
    if image.mode == "F" or image.mode.startswith("I"):
        image = Image.fromarray(_to_8_bits(image))
    try:
        return (image.convert("RGB") if image.mode == "LAB" else image).convert(mode)
    except ValueError as error:
        raise BrokenImageError(
            f"an image in Pillow's mode {image.mode} cannot be converted to {mode}: save it as "
            "RGB or grey"
        ) from error


def _to_8_bits(image: Any) -> UInt8[np.ndarray, "rows columns"]:
    """Returns the elements of a grey image from 0 to 255.

    A mode with 16 in its name says what they mean. In the modes of 32 bits, "I" and "F", their
    range tells whether they are fractions, of 8 or of 16 bits.
    """
    elements = np.asarray(image).astype(np.float32)
    lowest, highest = elements.min(), elements.max()
    if not (lowest >= 0 and highest <= 65535):  # or not a number
        raise BrokenImageError(
            f"an image in Pillow's mode {image.mode} has elements from {lowest:g} to {highest:g}: "
            "save it with 8 or 16 bits, or as fractions from 0 to 1"
        )
    if image.mode == "F" and highest <= 1:
        elements = (255 * elements).round()
    elif "16" in image.mode or highest > 255:
        elements /= 256
    return elements.astype(np.uint8)


def normalization(name: str, kind: str = "model") -> dict[str, list[float]]:
    """Returns the mean and the standard deviation of each colour, whose values are 0 to 1.

    Args:
        name: timm's name of the model.
        kind: What to call it in errors.
    """
    import timm

    try:
        config: Any = timm.get_pretrained_cfg(name)
    except RuntimeError:  # no such tag
        config = None
    if config is None:
        names = timm.list_pretrained() if "." in name else timm.list_models()
        hint = _name_that_begins_with(name, names) or did_you_mean(name, names)
        raise UserError(f"{kind} {name!r} is not one of timm's {len(names)} models{hint}")
    return {"mean": list(config.mean), "std": list(config.std)}


def _name_that_begins_with(text: str, names: list[str]) -> str:
    """Returns the end of an error with the shortest name that goes on from a text, if any does."""
    longer = [name for name in names if text and name.startswith(text)]
    return f"; did you mean {min(longer, key=len)!r}?" if longer else ""
