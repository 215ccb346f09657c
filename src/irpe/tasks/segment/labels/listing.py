"""The images and label maps of a split, whatever the layout they were found in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int16

from irpe.errors import MissingFileError, UserError
from irpe.train.image_lists import files_by_name

IGNORED = 255  # the class of pixels that are neither trained on nor scored, in every layout
UNKNOWN = -1
MOST_CLASSES = IGNORED
_VALUES = 256  # of a label map with 8 bits per pixel


class Pair(NamedTuple):
    """An image and its label map.

    Args:
        image: The file of the image.
        labels: The file of the label map.
    """

    image: Path
    labels: Path


@dataclass(frozen=True)
class LabelListing:
    """The labelled images of a split.

    Args:
        pairs: The images with their label maps.
        classes: The names of the classes.
        lookup: The class of each label value, `IGNORED` or `UNKNOWN`.
        palette: The label value of each colour, for label maps that are colour images; empty where
            these are not understood.
    """

    pairs: Sequence[Pair]
    classes: Sequence[str]
    lookup: Int16[np.ndarray, " value"]
    palette: Mapping[tuple[int, int, int], int]


def make_lookup(classes: Mapping[int, int]) -> Int16[np.ndarray, " value"]:
    """Returns a table from label values to classes; all others are unknown.

    Args:
        classes: The class of each label value that has one, or `IGNORED`.
    """
    lookup = np.full(_VALUES, UNKNOWN, np.int16)
    for value, label in classes.items():
        lookup[value] = label
    return lookup


def choose_names(given: Sequence[str], own: Sequence[str], layout: str) -> Sequence[str]:
    """Returns the names of the classes of a layout that has a fixed number of them.

    Args:
        given: Names that the user gave; none: those of the layout.
        own: The layout's own names.
        layout: What to call it.
    """
    if given and len(given) != len(own):
        raise UserError(
            f"{len(given)} names of classes were given, but {layout} has {len(own)} classes"
        )
    return given or own


def check_pairs(
    images: Mapping[str, Path],
    labels: Mapping[str, Path],
    label_of: Callable[[str], str],
    folders: tuple[Path, Path],
) -> list[Pair]:
    """Returns the pairs of images and label maps of the same names, or says which are missing.

    Args:
        images: The files of the images, by name.
        labels: The files of the label maps, by name.
        label_of: Returns the file that the label map of a name should be.
        folders: Where the images and the label maps are.
    """
    if not images:
        raise MissingFileError(f"{folders[0]} has no images")
    alone = [name for name in images if name not in labels]
    if alone:
        raise MissingFileError(
            f"{len(alone)} of the {len(images)} images in {folders[0]} have no label map in "
            f"{folders[1]}; the first is {images[alone[0]].name}, which needs {label_of(alone[0])}:"
            " add it, or remove the image"
        )
    alone = [name for name in labels if name not in images]
    if alone:
        raise MissingFileError(
            f"{len(alone)} of the {len(labels)} label maps in {folders[1]} have no image in "
            f"{folders[0]}; the first is {labels[alone[0]].name}: add the image, or remove the "
            "label map"
        )
    return [Pair(images[name], labels[name]) for name in sorted(images)]


def pair_folders(images: Path, labels: Path) -> list[Pair]:
    """Returns the images of a folder with the label maps of the same names in another one."""
    if not labels.is_dir():
        raise MissingFileError(f"{labels} is missing; the label maps of {images} belong there")
    return check_pairs(
        {name: images / file for name, file in files_by_name(images).items()},
        {name: labels / file for name, file in files_by_name(labels, (".png",)).items()},
        lambda name: f"{name}.png",
        (images, labels),
    )


def split_folders(data: Path, images: str, labels: str) -> list[str]:
    """Returns the names of the folders in a folder of images, if there is one of label maps too."""
    if not (data / images).is_dir() or not (data / labels).is_dir():
        return []
    return sorted(path.name for path in (data / images).iterdir() if path.is_dir())
