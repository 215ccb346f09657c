"""Images as Pillow reads them: what a broken file raises, and colours."""

import struct
from typing import Any

import numpy as np
from PIL import Image

# What Pillow raises for a file that is not an image, or is cut off.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)


class BrokenImageError(ValueError):
    """An image that cannot be read."""


def convert_mode(image: Any, mode: str) -> Any:
    """Returns a Pillow image in another mode, "RGB" or "L".

    Images of 16 bits per pixel are scaled to 8 first, where Pillow would clip them.
    """
    if image.mode.startswith("I"):
        scaled = np.asarray(image).astype(np.float32) / 256
        image = Image.fromarray(scaled.clip(0, 255).astype(np.uint8))
    return image.convert(mode)
