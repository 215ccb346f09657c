"""Label maps in the layout of Pascal VOC: ImageSets/Segmentation, JPEGImages, SegmentationClass.

The label maps have a palette: Pillow reads the label values from it. Where a tool has saved them as
colour images, the palette's colours are mapped back to label values.
"""

from collections.abc import Sequence
from pathlib import Path

from irpe.errors import MissingFileError
from irpe.tasks.segment.labels.listing import (
    IGNORED,
    LabelListing,
    Pair,
    choose_names,
    make_lookup,
)
from irpe.train.image_lists import check_lists, files_by_name, held_out_part, read_names

LABELS = "SegmentationClass"
CLASSES = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
    "cow", "dining table", "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa",
    "train", "tv monitor",
)  # fmt: skip


def find_splits(data: Path, holdout: float = 0.0) -> list[str]:
    """Returns the splits of a folder in this layout; none where it is in another one.

    Args:
        data: The folder.
        holdout: The fraction that is held out as "val" where there are no lists.
    """
    lists = data / "ImageSets" / "Segmentation"
    found = sorted(path.stem for path in lists.glob("*.txt"))
    if (data / LABELS).is_dir():
        check_lists(found, lists, holdout)
    return ["train", "val"] if holdout else found


def list_pascal(data: Path, split: str, names: Sequence[str], holdout: float = 0.0) -> LabelListing:
    """Returns the images of a split with their label maps.

    Args:
        data: The folder with ImageSets, JPEGImages and SegmentationClass.
        split: For example "train".
        names: The names of the 21 classes; none: Pascal VOC's own.
        holdout: The fraction of all label maps that is held out as "val"; 0: lists say it.
    """
    path = data / "ImageSets" / "Segmentation" / f"{split}.txt"
    images, labels = data / "JPEGImages", data / LABELS
    for folder in (images, labels):
        if not folder.is_dir():
            raise MissingFileError(f"{folder} is missing; Pascal VOC's layout has it")
    found = files_by_name(images), files_by_name(labels, (".png",))
    if holdout:
        every = sorted(found[1])
        listed, path = [every[i] for i in held_out_part(len(every), holdout, split)], labels
    else:
        listed = read_names(path, "segmentation")
    for name in listed:
        for folder, files in zip((images, labels), found, strict=True):
            if name not in files:
                raise MissingFileError(
                    f"{folder} has no file for {name}, which {path} lists: add it, or take the "
                    "name out of the list"
                )
    pairs = [Pair(images / found[0][name], labels / found[1][name]) for name in listed]
    classes = choose_names(names, CLASSES, "Pascal VOC")
    lookup = {value: value for value in range(len(CLASSES))}
    colours = {voc_colour(value): value for value in (*lookup, IGNORED)}
    return LabelListing(pairs, classes, make_lookup({**lookup, IGNORED: IGNORED}), colours)


def voc_colour(value: int) -> tuple[int, int, int]:
    """Returns red, green and blue of a label value in Pascal VOC's palette.

    The bits of the value go to the three colours in turn, the lowest ones to the highest bits.
    """
    red, green, blue = (
        sum((value >> (3 * k + colour) & 1) << (7 - k) for k in range(3)) for colour in range(3)
    )
    return red, green, blue
