"""Images with label maps, from a folder in one of four layouts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from irpe.errors import MissingFileError, UserError
from irpe.progress import Listener, silent, tracked
from irpe.tasks.segment.labels import ade20k, cityscapes, folders, pascal
from irpe.tasks.segment.labels.listing import IGNORED, UNKNOWN, LabelListing, Pair
from irpe.train.image_files import UNREADABLE, BrokenImageError, check_regular, convert_mode
from irpe.train.image_lists import read_lines

LabelMap = UInt8[np.ndarray, "rows columns"]
_SHOWN = 5  # label values in an error
_ONE_CHANNEL = ("L", "P", "1", "I", "I;16", "I;16B")  # Pillow's modes of label maps


@dataclass(frozen=True)
class LabelledPixels:
    """Images that can be read one by one, with a class for each pixel.

    Args:
        listing: The files and the classes.
    """

    listing: LabelListing

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes, in the order of the labels."""
        return self.listing.classes

    def __len__(self) -> int:
        return len(self.listing.pairs)

    def read(self, index: int) -> tuple[Image.Image, LabelMap]:
        """Returns an image in colour and the class of each pixel, `IGNORED` where it has none."""
        pair = self.listing.pairs[index]
        image = _read(pair.image, lambda found: convert_mode(found, "RGB"))
        values = _read_values(pair.labels, self.listing.palette)
        _check_sizes(pair, image.size, values)
        return image, _to_classes(values, self.listing, pair)

    def filename(self, index: int) -> str:
        """Returns the file of an image."""
        return str(self.listing.pairs[index].image)

    def first(self, count: int) -> "LabelledPixels":
        """Returns the first images only, all where there are fewer."""
        return self._subset(range(min(count, len(self))))

    def _subset(self, indices: Sequence[int]) -> "LabelledPixels":
        pairs = [self.listing.pairs[index] for index in indices]
        return LabelledPixels(replace(self.listing, pairs=pairs))


def open_pixels(
    data: str,
    split: str,
    ignore_label: int = IGNORED,
    class_names: str | None = None,
    classes: Sequence[str] = (),
    holdout: float = 0.0,
    listen: Listener = silent,
) -> LabelledPixels:
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
    names = list(classes) or (read_class_names(Path(class_names)) if class_names else [])
    if holdout and not (folder / pascal.LABELS).is_dir():
        raise UserError(
            f"--holdout is for Pascal VOC without lists of images: {data} has no {pascal.LABELS}/, "
            "leave it out"
        )
    layouts: dict[str, tuple[list[str], Callable[[str], LabelListing]]] = {
        "Cityscapes": (
            cityscapes.find_splits(folder),
            lambda s: cityscapes.list_cityscapes(folder, s, names),
        ),
        "Pascal VOC": (
            pascal.find_splits(folder, holdout),
            lambda s: pascal.list_pascal(folder, s, names, holdout),
        ),
        "ADE20K": (
            ade20k.find_splits(folder),
            lambda s: ade20k.list_ade20k(folder, s, names),
        ),
        "own": (
            folders.find_splits(folder),
            lambda s: _list_own(folder, s, names, ignore_label, not classes, listen),
        ),
    }
    for name, (splits, list_split) in layouts.items():
        if not splits:
            continue
        if name != "own" and ignore_label != IGNORED:
            raise UserError(
                f"ignore_label = {ignore_label} is for folders in the library's own layout: {data} "
                f"is in that of {name}, which says itself what is ignored; leave it out"
            )
        return LabelledPixels(list_split(_choose_split(split, splits, folder)))
    raise MissingFileError(
        f"{data} is in none of the layouts images/SPLIT and labels/SPLIT, Cityscapes "
        "(leftImg8bit/SPLIT and gtFine/SPLIT), ADE20K (images/SPLIT and annotations/SPLIT) or "
        "Pascal VOC (ImageSets/Segmentation/SPLIT.txt, JPEGImages and SegmentationClass)"
    )


def read_class_names(path: Path) -> list[str]:
    """Returns the names of classes in a text file, one in each line."""
    if not path.is_file():
        raise MissingFileError(f"class_names {str(path)!r} does not exist")
    names = read_lines(path)
    double = sorted({name for name in names if names.count(name) > 1})
    if double or len(names) < 2:
        fault = f"has {double[0]!r} twice" if double else f"has {len(names)} lines"
        raise UserError(f"{path} {fault}: it needs a different name for each of the classes")
    return names


def _choose_split(split: str, splits: list[str], folder: Path) -> str:
    for name in (split, ade20k.SPLITS.get(split)):
        if name in splits:
            return name
    raise MissingFileError(f"{folder} has no split {split!r}; it has {', '.join(splits)}")


def _list_own(
    folder: Path,
    split: str,
    names: Sequence[str],
    ignore_label: int,
    is_first: bool,
    listen: Listener,
) -> LabelListing:
    """Returns the listing of a split in the library's own layout, whose label maps are checked."""
    pairs = folders.list_pairs(folder, split)
    found = _scan(pairs, listen)
    own = [value for value in found if value != ignore_label]
    if is_first and names and ignore_label < len(names):  # the file names every label value
        names = [name for value, name in enumerate(names) if value != ignore_label]
    if not names:
        highest = max(own, default=0)
        names = [str(value) for value in range(highest + 1) if value != ignore_label]
    listing = folders.list_folders(pairs, names, ignore_label)
    for value, pair in found.items():
        if listing.lookup[value] == UNKNOWN:
            raise _unknown_values([value], listing, pair)
    return listing


def _scan(pairs: Sequence[Pair], listen: Listener) -> dict[int, Pair]:
    """Returns the label values that occur, each with the first files that have it."""
    found: dict[int, Pair] = {}
    for pair in tracked(listen, pairs, len(pairs), "checking label maps"):
        values = _read_values(pair.labels, {})
        _check_sizes(pair, _read(pair.image, lambda image: image.size), values)
        for value in np.unique(values).tolist():
            found.setdefault(value, pair)
    return dict(sorted(found.items()))


def _read(path: Path, use: Callable[[Any], Any]) -> Any:
    """Returns what a function makes of an opened image."""
    try:
        check_regular(path)
        with Image.open(path) as image:
            return use(image)
    except UNREADABLE as error:
        raise BrokenImageError(
            f"{path} cannot be read: {error}; restore it, or remove it and its pair"
        ) from error


def _read_values(path: Path, palette: Any) -> Any:
    """Returns the label value of each pixel of a label map."""
    mode, pixels = _read(path, lambda image: (image.mode, np.asarray(image)))
    if mode == "RGB" and palette:
        return _from_colours(pixels, palette, path)
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


def _from_colours(pixels: Any, palette: Any, path: Path) -> Any:
    codes = (pixels.astype(np.int32) * (1 << 16, 1 << 8, 1)).sum(-1)
    table = {(r << 16) + (g << 8) + b: value for (r, g, b), value in palette.items()}
    found, indices = np.unique(codes, return_inverse=True)
    unknown = [code for code in found.tolist() if code not in table]
    if unknown:
        raise UserError(
            f"{path} has the colour #{unknown[0]:06x}, which is not in Pascal VOC's palette: save "
            "it with one channel, whose values are the classes"
        )
    values = np.array([table[code] for code in found.tolist()], np.uint8)
    return values[indices.reshape(codes.shape)]


def _check_sizes(pair: Pair, size: tuple[int, int], values: Any) -> None:
    rows, columns = values.shape
    if size != (columns, rows):
        raise UserError(
            f"{pair.image} has {size[0]} x {size[1]} pixels, its label map {pair.labels} "
            f"{columns} x {rows}: both need the same size"
        )


def _to_classes(values: Any, listing: LabelListing, pair: Pair) -> LabelMap:
    labels = listing.lookup[values]
    if (labels == UNKNOWN).any():
        raise _unknown_values(np.unique(values[labels == UNKNOWN]).tolist(), listing, pair)
    return labels.astype(np.uint8)


def _unknown_values(values: list[int], listing: LabelListing, pair: Pair) -> UserError:
    shown = ", ".join(map(str, values[:_SHOWN])) + (", ..." if len(values) > _SHOWN else "")
    known = np.flatnonzero((listing.lookup != UNKNOWN) & (listing.lookup != IGNORED))
    return UserError(
        f"{pair.labels} has the label value {shown}, which has no class: the {len(known)} classes "
        f"are the values {known.min()} to {known.max()}; ignore it with ignore_label, or add it to "
        "the classes"
    )
