"""Label maps in two folders: images/SPLIT and labels/SPLIT, with files of the same names.

The classes are the label values from 0 on, without the ignored one.
"""

from collections.abc import Sequence
from pathlib import Path

from irpe.errors import UserError
from irpe.tasks.segment.labels.listing import (
    IGNORED,
    MOST_CLASSES,
    LabelListing,
    Pair,
    make_lookup,
    pair_folders,
    split_folders,
)


def find_splits(data: Path) -> list[str]:
    """Returns the splits of a folder in this layout; none where it is in another one."""
    return split_folders(data, "images", "labels")


def list_pairs(data: Path, split: str) -> list[Pair]:
    """Returns the images of a split with their label maps."""
    return pair_folders(data / "images" / split, data / "labels" / split)


def list_folders(pairs: Sequence[Pair], classes: Sequence[str], ignore_label: int) -> LabelListing:
    """Returns the listing of a split.

    Args:
        pairs: The images with their label maps.
        classes: The names of the classes: label values from 0 on, without the ignored one.
        ignore_label: The label value of pixels that have no class.
    """
    values = class_values(len(classes), ignore_label)
    lookup = {value: label for label, value in enumerate(values)}
    return LabelListing(pairs, classes, make_lookup({**lookup, ignore_label: IGNORED}), {})


def class_values(count: int, ignore_label: int) -> list[int]:
    """Returns the label values of some classes: from 0 on, without the ignored one."""
    if not 2 <= count <= MOST_CLASSES:
        raise UserError(f"there are {count} classes: from 2 to {MOST_CLASSES} are possible")
    return [value for value in range(count + 1) if value != ignore_label][:count]
