"""Image files: found by name, read as Pillow does, and shown with words. Torch is not needed."""

import math
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from reprlib import repr as shortened
from typing import Any, TypeVar

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageDraw, ImageFont

from irpe.errors import MissingFileError, UserError, did_you_mean
from irpe.files import check_regular

T = TypeVar("T")
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
CACHE_BYTES = 2**28  # images that take less than this together are cached in memory

_GREYISH = 16  # of 256 values by which the channels of a grey image may differ
_LEAST = 224  # pixels of the longer side of an image that is shown, so that words can be read
_LINE = 18  # pixels
# What Pillow raises for a file that is not an image, or is cut off.
UNREADABLE = (
    OSError, SyntaxError, ValueError, EOFError, struct.error, Image.DecompressionBombError,
)  # fmt: skip


class BrokenImageError(UserError):
    """An image that cannot be read: it is counted, and an error where too many are."""


def _load(image: Any) -> Any:
    image.load()
    return image


def read_image(file: Any, use: Callable[[Any], Any] = _load, name: str = "") -> Any:
    """Returns an image, or what a function makes of it before it is closed.

    Args:
        file: Its path, or an opened file.
        use: The function.
        name: What to call the image in errors, if not by its path.
    """
    try:
        if isinstance(file, str | Path):
            check_regular(file)
        with Image.open(file) as image:
            return use(image)
    except UNREADABLE as error:
        raise BrokenImageError(f"{name or file} cannot be read: {error}") from error


def read_or_next(read: Callable[[int], T], index: int, count: int) -> tuple[T, bool]:
    """Returns an image, or the next one that can be read, and whether it is another one."""
    for other in range(index, index + count):
        try:
            return read(other % count), other != index
        except BrokenImageError:
            continue
    raise UserError(f"none of the {count} images can be read")


def has_colours(image: Any) -> bool:
    """Returns whether a Pillow image shows colours; a grey one may be stored in a mode with them.

    Small differences between its channels are those of its compression.
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


def preparation_of(model: Any, kind: str = "model") -> dict[str, Any]:
    """Returns how timm prepares the images of a model: mean, std, crop_pct, interpolation, ..."""
    import timm
    from timm.data.config import resolve_data_config

    config: Any = model
    if isinstance(model, str):
        try:
            config = timm.get_pretrained_cfg(model)
        except RuntimeError:  # no such tag
            config = None
        if config is None:
            names = timm.list_pretrained() if "." in model else timm.list_models()
            hint = did_you_mean(model, names)
            raise UserError(f"{kind} {model!r} is not one of timm's {len(names)} models{hint}")
        config = config.to_dict()
    else:
        config = model.pretrained_cfg
    return resolve_data_config({}, pretrained_cfg=config)


def colours_of_channels(preparation: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """Returns the mean and the deviation of a preparation, averaged for grey images."""
    colours = {name: tuple(preparation[name]) for name in ("mean", "std")}
    if channels == 3:
        return colours
    return {name: (sum(each) / len(each),) for name, each in colours.items()}


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a text file that are not empty, without the space around them."""
    check_regular(path)
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except ValueError as error:
        raise UserError(f"{path} is not text: {error}") from error
    return [line.strip() for line in lines if line.strip()]


def read_names(path: Path, purpose: str) -> list[str]:
    """Returns the names of images in a list of Pascal VOC, without the ending of the files."""
    names = read_lines(path)
    for name, times in Counter(names).items():
        if len(name.split()) > 1:
            raise UserError(
                f"{path}: {name!r} is not the name of an image; lists for one class, with a number "
                f"after each name, are not for {purpose}"
            )
        if times > 1:
            raise UserError(f"{path}: the image {name} occurs {times} times; list it once")
        check_relative(name, str(path))
    if not names:
        raise UserError(f"{path} lists no images")
    return names


def held_out_indices(count: int, fraction: float) -> tuple[list[int], list[int]]:
    """Returns the indices to train on and those held out: for a fraction, always the same."""
    order = np.random.default_rng(0).permutation(count).tolist()
    held = math.ceil(count * fraction)
    if not 0 < held < count:
        raise UserError(f"holdout = {fraction} of {count} images leaves an empty split")
    return sorted(order[held:]), sorted(order[:held])


def held_out_part(count: int, fraction: float, split: str) -> list[int]:
    """Returns the indices of a split that is made by holding a fraction of the images out."""
    if split not in ("train", "val"):
        raise UserError(f"split {split!r}: with --holdout the splits are train and val")
    return held_out_indices(count, fraction)[split == "val"]


def check_lists(lists: Sequence[object], folder: Path, fraction: float) -> None:
    """Raises an error unless splits are listed in a folder, or made by holding a fraction out."""
    if lists and fraction:
        raise UserError(
            f"--holdout is for folders without splits: {folder} lists some, leave it out"
        )
    if not (lists or fraction):
        raise MissingFileError(
            f"{folder} has no lists of images, SPLIT.txt: add them, or hold some images out for "
            "validation: --holdout 0.2"
        )


def check_relative(name: str, where: str) -> None:
    """Refuses a file name that leads out of its folder."""
    path = PureWindowsPath(name)  # which knows both kinds of slash
    if path.anchor or ".." in path.parts or not path.parts:
        raise UserError(
            f"{where}: the file name {shortened(name)} leads out of the data folder; "
            "it must be relative, without '..'"
        )


def files_by_name(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> dict[str, Path]:
    """Returns the image files of a folder by their names without the ending."""
    if not folder.is_dir():
        raise MissingFileError(f"{folder} is missing, which the layout of the data has")
    found: dict[str, Path] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() not in suffixes:
            continue
        if file.stem in found:
            raise UserError(f"{folder} has both {found[file.stem].name} and {file.name}; keep one")
        found[file.stem] = file
    return found


def enlarged(image: Any) -> Any:
    """Returns an image in colour, a multiple of its size where it is small."""
    factor = max(1, -(-_LEAST // max(image.size)))
    size = factor * image.width, factor * image.height
    return image.convert("RGB").resize(size, Image.Resampling.NEAREST)


def write_below(image: Any, text: str) -> Any:
    """Returns an image with a line of text below it."""
    image, font = enlarged(image), ImageFont.load_default(12)
    width = max(image.width, int(font.getlength(text)) + 8)
    page = Image.new("RGB", (width, image.height + _LINE), "white")
    page.paste(image, (0, 0))
    ImageDraw.Draw(page).text((4, image.height + 2), text, "black", font=font)
    return page


def beside(images: Sequence[Any], titles: Sequence[str]) -> Any:
    """Returns images beside one another, each with its title below."""
    pages = [write_below(*each) for each in zip(images, titles, strict=True)]
    width = sum(page.width for page in pages) + 4 * len(pages) - 4
    row = Image.new("RGB", (width, pages[0].height), "white")
    left = 0
    for page in pages:
        row.paste(page, (left, 0))
        left += page.width + 4
    return row
