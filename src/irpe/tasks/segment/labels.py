"""Images with label maps, whose pixels are classes, in one of four layouts.

In the library's own, images/SPLIT and labels/SPLIT, the classes are the label values from 0 on,
without the ignored one. Of Cityscapes' ids (*_gtFine_labelIds.png), 19 are classes and the others
ignored. Of the label values of ADE20K's scene parsing, 1 to 150 are classes, named in
objectInfo150.txt, and 0 is ignored. The label maps of Pascal VOC have a palette, from which Pillow
reads label values; where a tool has saved them as colour images, colours are mapped back.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int16, UInt8
from PIL import Image

from irpe.errors import MissingFileError, UserError
from irpe.progress import Listener, silent, tracked
from irpe.train.images import (
    BrokenImageError,
    check_lists,
    convert_mode,
    files_by_name,
    held_out_part,
    read_image,
    read_lines,
    read_names,
)

IGNORED = 255  # the class of pixels that are neither trained on nor scored, in every layout
CITYSCAPES = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole",
    19: "traffic light", 20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky",
    24: "person", 25: "rider", 26: "car", 27: "truck", 28: "bus", 31: "train", 32: "motorcycle",
    33: "bicycle",
}  # fmt: skip
PASCAL = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair",
    "cow", "dining table", "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa",
    "train", "tv monitor",
)  # fmt: skip
_UNKNOWN = -1
_VALUES = 256  # of a label map with 8 bits per pixel
_SHOWN = 5  # label values in an error
_ONE_CHANNEL = ("L", "P", "1", "I", "I;16", "I;16B")  # Pillow's modes of label maps
_ADE20K_SPLITS = {"train": "training", "val": "validation"}  # the usual names, and its own
_PASCAL_LABELS = "SegmentationClass"

Lookup = Int16[np.ndarray, " value"]


@dataclass(frozen=True)
class Layout:
    """The labelled images of a split.

    Args:
        images: The files of the images.
        labels: The files of their label maps.
        classes: The names of the classes.
        lookup: The class of each label value: `IGNORED`, or -1 for none.
        palette: The label value of each colour, for label maps that are colour images; empty where
            these are not understood.
    """

    images: Sequence[Path]
    labels: Sequence[Path]
    classes: Sequence[str]
    lookup: Lookup
    palette: Mapping[int, int] = field(default_factory=dict[int, int])

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Image.Image, UInt8[np.ndarray, "rows columns"]]:
        """Returns an image in colour and the class of each pixel, `IGNORED` where it has none."""
        image = read_image(self.images[index], lambda found: convert_mode(found, "RGB"))
        values = self.read_values(index, image.size)
        labels = self.lookup[values]
        if (labels == _UNKNOWN).any():
            raise self.unknown_values(np.unique(values[labels == _UNKNOWN]).tolist(), index)
        return image, labels.astype(np.uint8)

    def read_values(self, index: int, size: tuple[int, int]) -> Any:
        """Returns the label values of an image, which is that many columns and rows large."""
        values = _read_values(self.labels[index], self.palette)
        rows, columns = values.shape
        if size != (columns, rows):
            raise UserError(
                f"{self.images[index]} has {size[0]} x {size[1]} pixels, its label map "
                f"{self.labels[index]} {columns} x {rows}: both need the same size"
            )
        return values

    def unknown_values(self, values: list[int], index: int) -> UserError:
        """Returns the error of label values that are not of a class."""
        shown = ", ".join(map(str, values[:_SHOWN])) + (", ..." if len(values) > _SHOWN else "")
        known = np.flatnonzero((self.lookup != _UNKNOWN) & (self.lookup != IGNORED))
        return UserError(
            f"{self.labels[index]} has the label value {shown}, which has no class: the "
            f"{len(known)} classes are the values {known.min()} to {known.max()}; ignore it with "
            "ignore_label, or add it to the classes"
        )

    def filename(self, index: int) -> str:
        """Returns the file of an image."""
        return str(self.images[index])

    def first(self, count: int) -> "Layout":
        """Returns the first images only, all where there are fewer."""
        return replace(self, images=self.images[:count], labels=self.labels[:count])


def open_pixels(
    data: str,
    split: str,
    ignore_label: int = IGNORED,
    class_names: str | None = None,
    classes: Sequence[str] = (),
    holdout: float = 0.0,
    listen: Listener = silent,
) -> Layout:
    """Returns the images of a split with their label maps.

    In the library's own layout all label maps are read, which finds what is wrong with them before
    a training starts; in the others they are checked as they are read.

    Args:
        data: A folder in the library's own layout (images/SPLIT and labels/SPLIT), or that of
            Cityscapes, ADE20K or Pascal VOC.
        split: For example "train".
        ignore_label: The label value of pixels without a class, in the library's own layout.
        class_names: A text file with the name of a class in each line, in the order of the label
            values.
        classes: The classes that are known already; none: those of the file, or of the data.
        holdout: The fraction that is held out as "val" in Pascal VOC's layout without lists.
        listen: Hears how the check goes.
    """
    folder = Path(data)
    if not folder.is_dir():
        raise MissingFileError(f"data {data!r} is not a folder")
    if holdout and not (folder / _PASCAL_LABELS).is_dir():
        raise UserError(
            f"--holdout is for Pascal VOC without lists of images: {data} has no {_PASCAL_LABELS}/,"
            " leave it out"
        )
    names = list(classes) or (_read_class_names(Path(class_names)) if class_names else [])
    is_first = not classes
    layouts: dict[str, tuple[list[str], Callable[[str], Layout]]] = {
        "Cityscapes": (
            _folders(folder, "leftImg8bit", "gtFine"),
            lambda name: _cityscapes(folder, name, names),
        ),
        "Pascal VOC": (
            _pascal_splits(folder, holdout),
            lambda name: _pascal(folder, name, names, holdout),
        ),
        "ADE20K": (
            _folders(folder, "images", "annotations"),
            lambda name: _ade20k(folder, name, names),
        ),
        "own": (
            _folders(folder, "images", "labels"),
            lambda name: _own(folder, name, names, ignore_label, is_first, listen),
        ),
    }
    kind, (splits, make) = next((e for e in layouts.items() if e[1][0]), ("", ([], None)))
    if make is None:
        raise MissingFileError(
            f"{data} is in none of the layouts images/SPLIT and labels/SPLIT, Cityscapes "
            "(leftImg8bit/SPLIT and gtFine/SPLIT), ADE20K (images/SPLIT and annotations/SPLIT) or "
            "Pascal VOC (ImageSets/Segmentation/SPLIT.txt, JPEGImages and SegmentationClass)"
        )
    if kind != "own" and ignore_label != IGNORED:
        raise UserError(
            f"ignore_label = {ignore_label} is for folders in the library's own layout: {data} is "
            f"in that of {kind}, which says itself what is ignored; leave it out"
        )
    name = split if split in splits else _ADE20K_SPLITS.get(split)
    if name not in splits:
        raise MissingFileError(f"{folder} has no split {split!r}; it has {', '.join(splits)}")
    return make(name)


def _folders(data: Path, images: str, labels: str) -> list[str]:
    """Returns the names of the folders in a folder of images, if there is one of label maps too."""
    if not (data / images).is_dir() or not (data / labels).is_dir():
        return []
    return sorted(path.name for path in (data / images).iterdir() if path.is_dir())


def _cityscapes(data: Path, split: str, names: Sequence[str]) -> Layout:
    def find(folder: Path, ending: str) -> dict[str, Path]:
        paths = folder.glob(f"*/*{ending}")
        return {path.relative_to(folder).as_posix().removesuffix(ending): path for path in paths}

    folders, ending = (
        (data / "leftImg8bit" / split, data / "gtFine" / split),
        "_gtFine_labelIds.png",
    )
    images, labels = find(folders[0], "_leftImg8bit.png"), find(folders[1], ending)
    classes = _choose_names(names, list(CITYSCAPES.values()), "Cityscapes")
    lookup = dict.fromkeys(range(max(CITYSCAPES) + 1), IGNORED)
    lookup |= {value: label for label, value in enumerate(CITYSCAPES)}
    return Layout(*_pair(images, labels, folders, ending), classes, _make_lookup(lookup))


def _ade20k(data: Path, split: str, names: Sequence[str]) -> Layout:
    count, path = 150, data / "objectInfo150.txt"
    own = [str(value) for value in range(1, count + 1)]
    if path.is_file():  # a heading, then a line for each class, its name last
        own = [line.split("\t")[-1].split(",")[0].strip() for line in read_lines(path)[1:]]
    if len(own) != count:
        raise UserError(
            f"{path} has {len(own)} lines after its heading, not {count}: restore it, remove it, "
            "or name the classes with --class-names"
        )
    lookup = {0: IGNORED} | {value: value - 1 for value in range(1, count + 1)}
    pairs = _pair_folders(data / "images" / split, data / "annotations" / split)
    return Layout(*pairs, _choose_names(names, own, "ADE20K"), _make_lookup(lookup))


def _pascal_splits(data: Path, holdout: float) -> list[str]:
    lists = data / "ImageSets" / "Segmentation"
    found = sorted(path.stem for path in lists.glob("*.txt"))
    if (data / _PASCAL_LABELS).is_dir():
        check_lists(found, lists, holdout)
    return ["train", "val"] if holdout else found


def _pascal(data: Path, split: str, names: Sequence[str], holdout: float) -> Layout:
    path = data / "ImageSets" / "Segmentation" / f"{split}.txt"
    images = files_by_name(data / "JPEGImages")
    labels = files_by_name(data / _PASCAL_LABELS, (".png",))
    if holdout:
        every = sorted(labels)
        listed, path = [every[i] for i in held_out_part(len(every), holdout, split)], path.parent
    else:
        listed = read_names(path, "segmentation")
    for name in listed:
        if name not in images or name not in labels:
            lacking = _PASCAL_LABELS if name in images else "JPEGImages"
            raise MissingFileError(
                f"{data / lacking} has no file for {name}, which {path} lists: add it, or take the "
                "name out of the list"
            )
    values = range(len(PASCAL))
    return Layout(
        [images[name] for name in listed],
        [labels[name] for name in listed],
        _choose_names(names, PASCAL, "Pascal VOC"),
        _make_lookup({value: value for value in values}),
        {_pascal_colour(value): value for value in (*values, IGNORED)},
    )


def _pascal_colour(value: int) -> int:
    """Returns the colour of a label value in Pascal VOC's palette, 8 bits each of red, green, blue.

    The bits of the value go to the three colours in turn, the lowest ones to the highest bits.
    """
    bits = ((value >> bit & 1, bit) for bit in range(8))
    return sum(is_set << (8 * (2 - bit % 3) + 7 - bit // 3) for is_set, bit in bits)


def _own(
    data: Path,
    split: str,
    names: Sequence[str],
    ignore_label: int,
    is_first: bool,
    listen: Listener,
) -> Layout:
    pairs = _pair_folders(data / "images" / split, data / "labels" / split)
    layout = Layout(*pairs, names, _make_lookup({}))
    found: dict[int, int] = {}  # the first image that has a label value
    for index in tracked(listen, range(len(layout)), len(layout), "checking label maps"):
        try:
            size = read_image(layout.images[index], lambda image: image.size)
            values = layout.read_values(index, size)
        except BrokenImageError:
            continue  # it is counted when it is read
        for value in np.unique(values).tolist():
            found.setdefault(value, index)
    if is_first and names and ignore_label < len(names):  # the file names every label value
        names = [name for value, name in enumerate(names) if value != ignore_label]
    highest = max((value for value in found if value != ignore_label), default=0)
    names = names or [str(value) for value in range(highest + 1) if value != ignore_label]
    if not 2 <= len(names) <= IGNORED:
        raise UserError(f"there are {len(names)} classes: from 2 to {IGNORED} are possible")
    own = [value for value in range(len(names) + 1) if value != ignore_label][: len(names)]
    lookup = _make_lookup({value: label for label, value in enumerate(own)}, ignore_label)
    layout = replace(layout, classes=names, lookup=lookup)
    for value, index in sorted(found.items()):
        if lookup[value] == _UNKNOWN:
            raise layout.unknown_values([value], index)
    return layout


def _make_lookup(classes: Mapping[int, int], ignored: int = IGNORED) -> Lookup:
    """Returns a table from label values to classes; all others but the ignored are unknown."""
    lookup = np.full(_VALUES, _UNKNOWN, np.int16)
    lookup[ignored] = IGNORED
    for value, label in classes.items():
        lookup[value] = label
    return lookup


def _read_class_names(path: Path) -> list[str]:
    """Returns the names of classes in a text file, one in each line."""
    if not path.is_file():
        raise MissingFileError(f"class_names {str(path)!r} does not exist")
    names = read_lines(path)
    double = sorted({name for name in names if names.count(name) > 1})
    if double or len(names) < 2:
        fault = f"has {double[0]!r} twice" if double else f"has {len(names)} lines"
        raise UserError(f"{path} {fault}: it needs a different name for each of the classes")
    return names


def _choose_names(given: Sequence[str], own: Sequence[str], layout: str) -> Sequence[str]:
    """Returns the names of the classes of a layout that has a fixed number of them."""
    if given and len(given) != len(own):
        raise UserError(
            f"{len(given)} names of classes were given, but {layout} has {len(own)} classes"
        )
    return given or own


def _pair_folders(images: Path, labels: Path) -> tuple[list[Path], list[Path]]:
    """Returns the images of a folder with the label maps of the same names in another one."""
    files = files_by_name(labels, (".png",))
    return _pair(files_by_name(images), files, (images, labels), ".png")


def _pair(
    images: Mapping[str, Path],
    labels: Mapping[str, Path],
    folders: tuple[Path, Path],
    ending: str,
) -> tuple[list[Path], list[Path]]:
    """Returns the images and label maps of the same names, or says which are missing."""
    if not images:
        raise MissingFileError(f"{folders[0]} has no images")
    both = (images, "images", "label map"), (labels, "label maps", "image")
    for (own, kind, lacking), (other, *_), folder in zip(both, both[::-1], folders, strict=True):
        alone = [name for name in own if name not in other]
        if alone:
            needed = f", {alone[0]}{ending}" if lacking == "label map" else ""
            raise MissingFileError(
                f"{len(alone)} of the {len(own)} {kind} in {folder} have no {lacking}; the first "
                f"is {own[alone[0]].name}: add its {lacking}{needed}, or remove it"
            )
    names = sorted(images)
    return [images[name] for name in names], [labels[name] for name in names]


def _read_values(path: Path, palette: Mapping[int, int]) -> Any:
    """Returns the label value of each pixel of a label map."""
    mode, pixels = read_image(path, lambda image: (image.mode, np.asarray(image)))
    if mode == "RGB" and palette:
        codes = (pixels.astype(np.int32) * (1 << 16, 1 << 8, 1)).sum(-1)
        colours, indices = np.unique(codes, return_inverse=True)
        unknown = [code for code in colours.tolist() if code not in palette]
        if unknown:
            raise UserError(
                f"{path} has the colour #{unknown[0]:06x}, which is not in Pascal VOC's palette: "
                "save it with one channel, whose values are the classes"
            )
        values = np.array([palette[code] for code in colours.tolist()], np.uint8)
        return values[indices.reshape(codes.shape)]
    if mode not in _ONE_CHANNEL:
        raise UserError(
            f"{path} is a colour image (Pillow's mode {mode}), not a label map: save it with one "
            "channel, whose values are the classes"
        )
    if pixels.size and not 0 <= pixels.min() <= pixels.max() <= IGNORED:
        raise UserError(
            f"{path} has the label value {pixels.max()}: label values are from 0 to {IGNORED}"
        )
    return pixels.astype(np.uint8)
