"""Boxes in the layout of Pascal VOC: one XML file per image.

Coordinates are taken as they are: xmin ymin xmax ymax are the corners of a box, counted from 0, as
the tools that write such files today mean them. In Pascal's own files pixels count from 1 and the
last one is inside, so that their boxes lack one row of pixels above and one column to the left.

Objects marked `difficult` are treated as crowds of COCO: they are not trained on, and it changes no
score whether they are detected.
"""

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple
from xml.etree import ElementTree

from irpe.errors import MissingFileError, UserError
from irpe.tasks.detect.annotations.listing import (
    MAX_SIDE,
    SIDE_RULE,
    Listing,
    check_files,
    clip_box,
    is_side,
    make_content,
    unknown_class,
)
from irpe.train.image_files import check_regular
from irpe.train.image_lists import check_relative, files_by_name, read_names


class _Object(NamedTuple):
    where: str
    name: str
    box: list[float]
    is_difficult: bool


def read_voc(data: Path, path: Path, classes: Sequence[str] | None) -> Listing:
    """Returns the images and boxes of Pascal VOC files; ids count from 1.

    Args:
        data: The folder with Annotations and JPEGImages.
        path: The list of the images, ImageSets/Main/NAME.txt; the folder Annotations for all.
        classes: The names of the classes, in the order of the labels; `None` for those of the
            objects, sorted.
    """
    if path.is_dir():
        names = sorted(file.stem for file in path.glob("*.xml"))
    else:
        names = read_names(path, "detection")
    files = _files(data / "JPEGImages")
    images: list[dict[str, Any]] = []
    objects: list[list[_Object]] = []
    for number, name in enumerate(names, 1):
        width, height, inside = _read(data / "Annotations" / f"{name}.xml", path)
        size = {"width": width, "height": height}
        images.append({"id": number, "file_name": files.get(name, f"{name}.jpg"), **size})
        objects.append(inside)
    check_files(data / "JPEGImages", images, path)
    chosen = _classes(objects, classes, path)
    annotations, dropped = _annotations(images, objects, chosen)
    categories = list(range(1, len(chosen) + 1))
    content = make_content(images, annotations, dict(zip(categories, chosen, strict=True)))
    return Listing(data / "JPEGImages", path, content, chosen, categories, dropped)


def _files(folder: Path) -> dict[str, str]:
    """Returns the image files of a folder by their names without the ending."""
    if not folder.is_dir():
        raise MissingFileError(f"{folder} is missing; Pascal VOC has its images there")
    return files_by_name(folder)


def _read(path: Path, listed_in: Path) -> tuple[int, int, list[_Object]]:
    """Returns the width and the height of an image, and the objects in it."""
    root = _parse(path, listed_in)
    check_relative(root.findtext("filename") or path.name, str(path))
    width, height = (_size(root, f"size/{side}", path) for side in ("width", "height"))
    return (
        width,
        height,
        [
            _object(element, f"{path}: object {number}")
            for number, element in enumerate(root.iterfind("object"), 1)
        ],
    )


def _parse(path: Path, listed_in: Path) -> Any:
    try:
        check_regular(path)
        data = path.read_bytes()
        if b"\0" in data or b"<!DOCTYPE" in data:  # 16-bit characters would hide the latter
            raise UserError("a document type and 16-bit characters are refused")
        return ElementTree.fromstring(data)
    except FileNotFoundError as error:
        raise MissingFileError(f"{path} is missing, but {listed_in} lists its image") from error
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise UserError(f"{path} is damaged, or not XML: {error}") from error


def _size(root: Any, tag: str, path: Path) -> int:
    text = _text(root, tag, str(path))
    if not (text.isdecimal() and len(text) <= len(str(MAX_SIDE)) and is_side(int(text))):
        raise UserError(f"{path}: {tag} is {shortened(text)}; it must be {SIDE_RULE}")
    return int(text)


def _text(element: Any, tag: str, where: str) -> str:
    text = element.findtext(tag)
    if text is None:
        raise UserError(f"{where} has no {tag}")
    return text.strip()


def _object(element: Any, where: str) -> _Object:
    name = _text(element, "name", where)
    sides = ("xmin", "ymin", "xmax", "ymax")
    x1, y1, x2, y2 = (_number(_text(element, f"bndbox/{side}", where)) for side in sides)
    difficult = (element.findtext("difficult") or "0").strip()
    if not name or difficult not in ("0", "1"):
        wrong = f"difficult is {difficult!r}; it must be 0 or 1" if name else "it has no name"
        raise UserError(f"{where}: {wrong}")
    return _Object(where, name, [x1, y1, x2 - x1, y2 - y1], difficult == "1")


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan  # the box is invalid


def _classes(objects: list[list[_Object]], classes: Sequence[str] | None, path: Path) -> list[str]:
    if classes is None:
        names = sorted({each.name for inside in objects for each in inside})
        if not names:
            raise UserError(f"none of the {len(objects)} images of {path} has an object in it")
        return names
    for each in (each for inside in objects for each in inside):
        if each.name not in classes:
            raise unknown_class(each.name, classes, each.where)
    return list(classes)


def _annotations(
    images: list[dict[str, Any]], objects: list[list[_Object]], classes: list[str]
) -> tuple[list[dict[str, Any]], Counter[int]]:
    """Returns the valid boxes as COCO's annotations, and the number of others by image."""
    annotations: list[dict[str, Any]] = []
    dropped: Counter[int] = Counter()
    for image, inside in zip(images, objects, strict=True):
        for each in inside:
            if clip_box(each.box, image["width"], image["height"]) is None:
                dropped[image["id"]] += 1
                continue
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image["id"],
                    "category_id": classes.index(each.name) + 1,
                    "bbox": each.box,
                    "area": each.box[2] * each.box[3],
                    "iscrowd": int(each.is_difficult),
                }
            )
    return annotations, dropped
