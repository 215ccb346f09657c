"""Words and images put together with Pillow, for tasks that draw predictions."""

from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw, ImageFont

_LEAST = 224  # pixels of the longer side, so that words can be read
_LINE = 18  # pixels


def enlarged(image: Any) -> Any:
    """Returns an image in colour, a multiple of its size where it is small."""
    factor = max(1, -(-_LEAST // max(image.size)))
    size = factor * image.width, factor * image.height
    return image.convert("RGB").resize(size, Image.Resampling.NEAREST)


def write_below(image: Any, text: str) -> Any:
    """Returns an image with a line of text below it."""
    image = enlarged(image)
    width = max(image.width, int(_font().getlength(text)) + 8)
    page = Image.new("RGB", (width, image.height + _LINE), "white")
    page.paste(image, (0, 0))
    ImageDraw.Draw(page).text((4, image.height + 2), text, "black", font=_font())
    return page


def beside(images: Sequence[Any], titles: Sequence[str]) -> Any:
    """Returns images beside one another, each with its title below."""
    pages = [write_below(*each) for each in zip(images, titles, strict=True)]
    row = Image.new(
        "RGB", (sum(p.width for p in pages) + 4 * len(pages) - 4, pages[0].height), "white"
    )
    left = 0
    for page in pages:
        row.paste(page, (left, 0))
        left += page.width + 4
    return row


def _font() -> Any:
    return ImageFont.load_default(12)
