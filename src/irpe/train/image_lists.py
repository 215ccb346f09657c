"""Lists of image files: names in a text file, and the files of a folder by name."""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath
from reprlib import repr as shortened

import numpy as np

from irpe.errors import MissingFileError, UserError
from irpe.train.image_files import check_regular

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")


def read_lines(path: Path) -> list[str]:
    """Returns the lines of a text file that are not empty, without the space around them."""
    try:
        check_regular(path)
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except ValueError as error:
        raise UserError(f"{path} is not text: {error}") from error
    return [line.strip() for line in lines if line.strip()]


def read_names(path: Path, purpose: str) -> list[str]:
    """Returns the names of images in a list of Pascal VOC, without the ending of the files.

    Args:
        path: The list.
        purpose: What the images are for, to say in errors.
    """
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
    """Returns the indices to train on and those held out: for a fraction, always the same.

    Args:
        count: How many images there are.
        fraction: How many of them are held out.
    """
    order = np.random.default_rng(0).permutation(count).tolist()
    held = math.ceil(count * fraction)
    if not 0 < held < count:
        raise UserError(f"holdout = {fraction} of {count} images leaves an empty split")
    return sorted(order[held:]), sorted(order[:held])


def held_out_part(count: int, fraction: float, split: str) -> list[int]:
    """Returns the indices of a split that is made by holding images out.

    Args:
        count: How many images there are.
        fraction: How many of them are held out.
        split: "train", or "val" for those that are held out.
    """
    if split not in ("train", "val"):
        raise UserError(f"split {split!r}: with --holdout the splits are train and val")
    return held_out_indices(count, fraction)[split == "val"]


def check_lists(lists: Sequence[object], folder: Path, fraction: float) -> None:
    """Raises an error unless splits are listed, or made by holding images out.

    Args:
        lists: The lists.
        folder: Where they are, or would be.
        fraction: How many images are held out; 0: the lists say it.
    """
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


def files_by_name(folder: Path, suffixes: tuple[str, ...] = SUFFIXES) -> dict[str, str]:
    """Returns the image files of a folder by their names without the ending.

    Args:
        folder: The folder.
        suffixes: The endings of image files, in lower case.
    """
    found: dict[str, str] = {}
    for file in sorted(folder.iterdir()):
        if file.suffix.lower() not in suffixes:
            continue
        if file.stem in found:
            raise UserError(f"{folder} has both {found[file.stem]} and {file.name}; keep one")
        found[file.stem] = file.name
    return found
