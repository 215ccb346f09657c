"""Label maps in the layout of ADE20K's scene parsing: images/SPLIT and annotations/SPLIT.

Of the label values, 1 to 150 are classes and 0 is ignored. Their names are in objectInfo150.txt.
"""

from collections.abc import Sequence
from pathlib import Path

from irpe.errors import UserError
from irpe.tasks.segment.labels.listing import (
    IGNORED,
    LabelListing,
    choose_names,
    make_lookup,
    pair_folders,
    split_folders,
)
from irpe.train.image_lists import read_lines

NUM_CLASSES = 150
SPLITS = {"train": "training", "val": "validation"}  # the usual names, and ADE20K's
_NAMES = "objectInfo150.txt"


def find_splits(data: Path) -> list[str]:
    """Returns the splits of a folder in this layout; none where it is in another one."""
    return split_folders(data, "images", "annotations")


def list_ade20k(data: Path, split: str, names: Sequence[str]) -> LabelListing:
    """Returns the images of a split with their label maps.

    Args:
        data: The folder with images and annotations.
        split: "training" or "validation".
        names: The names of the 150 classes; none: those of objectInfo150.txt, or their label
            values.
    """
    pairs = pair_folders(data / "images" / split, data / "annotations" / split)
    lookup = {0: IGNORED} | {value: value - 1 for value in range(1, NUM_CLASSES + 1)}
    classes = choose_names(names, _own_names(data / _NAMES), "ADE20K")
    return LabelListing(pairs, classes, make_lookup({**lookup, IGNORED: IGNORED}), {})


def _own_names(path: Path) -> list[str]:
    """Returns the names in ADE20K's table: a heading, then a line for each class, name last."""
    if not path.is_file():
        return [str(value) for value in range(1, NUM_CLASSES + 1)]
    names = [line.split("\t")[-1].split(",")[0].strip() for line in read_lines(path)[1:]]
    if len(names) != NUM_CLASSES:
        raise UserError(
            f"{path} has {len(names)} lines after its heading, not {NUM_CLASSES}: restore it, "
            "remove it, or name the classes with --class-names"
        )
    return names
