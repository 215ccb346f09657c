"""The images and boxes of a split, whatever the layout they were read from, and shared checks."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from struct import pack, unpack
from typing import Any

from irpe.errors import MissingFileError, UserError

MAX_SIDE = 10**6  # pixels: no reader of images takes more, and boxes in float32 stay exact
SIDE_RULE = f"an integer from 1 to {MAX_SIDE}"


@dataclass(frozen=True)
class Listing:
    """The annotated images of a split.

    Args:
        folder: Where the images are.
        path: The file that lists them.
        content: COCO's dictionary: images, annotations, categories.
        classes: The names of the classes, in the order of the labels.
        categories: The category id of each class.
        dropped: How many invalid boxes were left out, by image id.
    """

    folder: Path
    path: Path
    content: dict[str, Any]
    classes: list[str]
    categories: list[int]
    dropped: Counter[int]


def make_content(
    images: list[dict[str, Any]], annotations: list[dict[str, Any]], names: dict[int, str]
) -> dict[str, Any]:
    """Returns COCO's dictionary.

    Args:
        images: Its images.
        annotations: Its annotations.
        names: The names of the categories, by id.
    """
    categories = [{"id": key, "name": names[key]} for key in sorted(names)]
    return {"info": {}, "images": images, "annotations": annotations, "categories": categories}


def clip_box(box: Any, width: int, height: int) -> list[float] | None:
    """Returns x1 y1 x2 y2 of a box x y width height, clipped to an image; `None` if it is invalid.

    A box is invalid if it is not four finite numbers or has no area inside the image.
    """
    if not isinstance(box, list) or len(box) != 4 or not all(map(is_finite_number, box)):
        return None
    x, y, w, h = box
    x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)
    if not (x1 < x2 and y1 < y2):
        return None
    x1, y1, x2, y2 = unpack("4f", pack("4f", x1, y1, x2, y2))  # as tensors hold them
    return [x1, y1, x2, y2] if x1 < x2 and y1 < y2 else None


def is_finite_number(value: Any) -> bool:
    """Tells whether a value is a finite number, booleans excluded."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_side(value: int) -> bool:
    """Tells whether a number of pixels can be the width or height of an image."""
    return 1 <= value <= MAX_SIDE


def unknown_class(name: str, classes: Sequence[str], where: str) -> UserError:
    """Returns the error of a category that is not among the classes."""
    known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
    return UserError(f"{where} is {name!r}, none of the {len(classes)} classes ({known})")


def check_files(folder: Path, images: Sequence[dict[str, Any]], path: Path) -> None:
    """Refuses images whose files are missing; each folder is listed once."""
    paths = [PurePosixPath(image["file_name"]) for image in images]
    found = {parent: _file_names(folder / parent) for parent in {name.parent for name in paths}}
    missing = [k for k, name in enumerate(paths) if name.name not in found[name.parent]]
    if missing:
        first = images[missing[0]]
        raise MissingFileError(
            f"{len(missing)} of the {len(images)} images of {path} are not in {folder}; the first "
            f"is {first['file_name']} (image id {first['id']}): add the files, or take the images "
            "out of the list"
        )


def _file_names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except (OSError, ValueError):  # not a folder, or not a valid name of one
        return set()
