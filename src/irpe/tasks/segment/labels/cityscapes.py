"""Label maps in the layout of Cityscapes: leftImg8bit/SPLIT/CITY and gtFine/SPLIT/CITY.

The label maps are those that come with the dataset, *_gtFine_labelIds.png. Of their ids, 19 are
classes that are scored; the others are ignored.
"""

from collections.abc import Sequence
from pathlib import Path

from irpe.tasks.segment.labels.listing import (
    IGNORED,
    LabelListing,
    check_pairs,
    choose_names,
    make_lookup,
    split_folders,
)

CLASSES = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole",
    19: "traffic light", 20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky",
    24: "person", 25: "rider", 26: "car", 27: "truck", 28: "bus", 31: "train", 32: "motorcycle",
    33: "bicycle",
}  # fmt: skip
_LAST_ID = 33
_IMAGE, _LABELS = "_leftImg8bit.png", "_gtFine_labelIds.png"


def find_splits(data: Path) -> list[str]:
    """Returns the splits of a folder in this layout; none where it is in another one."""
    return split_folders(data, "leftImg8bit", "gtFine")


def list_cityscapes(data: Path, split: str, names: Sequence[str]) -> LabelListing:
    """Returns the images of a split with their label maps.

    Args:
        data: The folder with leftImg8bit and gtFine.
        split: For example "train".
        names: The names of the 19 classes; none: Cityscapes' own.
    """
    images, labels = data / "leftImg8bit" / split, data / "gtFine" / split
    pairs = check_pairs(
        {_stem(path, images, _IMAGE): path for path in images.glob(f"*/*{_IMAGE}")},
        {_stem(path, labels, _LABELS): path for path in labels.glob(f"*/*{_LABELS}")},
        lambda stem: f"{stem}{_LABELS}",
        (images, labels),
    )
    lookup = dict.fromkeys(range(_LAST_ID + 1), IGNORED)
    lookup |= {value: label for label, value in enumerate(CLASSES)}
    classes = choose_names(names, list(CLASSES.values()), "Cityscapes")
    return LabelListing(pairs, classes, make_lookup({**lookup, IGNORED: IGNORED}), {})


def _stem(path: Path, folder: Path, ending: str) -> str:
    return path.relative_to(folder).as_posix().removesuffix(ending)
