"""Boxes in COCO's files, and the dictionary of COCO's that the boxes of all layouts become."""

import json
import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePosixPath, PureWindowsPath
from reprlib import repr as shortened
from struct import pack, unpack
from typing import Any


@dataclass(frozen=True)
class Listing:
    """What annotation files tell of the images of a split.

    Args:
        folder: Where the images are.
        path: The file that lists them.
        content: COCO's dictionary: images, annotations, categories.
        classes: The names that labels count.
        categories: The category id of each class.
        dropped: How many invalid boxes were left out, by image id.
    """

    folder: Path
    path: Path
    content: dict[str, Any]
    classes: list[str]
    categories: list[int]
    dropped: Counter[int]


def read_coco(path: Path, folder: Path, classes: Sequence[str] | None) -> Listing:
    """Returns what a file of COCO's tells.

    A box without `iscrowd` is no crowd, one without `area` has that of its rectangle. Boxes stay as
    they are in the file, so that they are scored as COCO's own tool scores them.

    Args:
        path: The file, instances_NAME.json.
        folder: Where the images are.
        classes: The names that labels count; `None` for those of the file.
    """
    raw = _load(path)
    names = _categories(raw["categories"], path)
    images = _images(raw["images"], path)
    check_files(folder, images, path)
    annotations, dropped = _annotations(raw["annotations"], path, images, names)
    numbered = _number(names, classes, path)
    content = {
        "info": {},
        "images": images,
        "annotations": annotations,
        "categories": named(names | dict(zip(numbered[1], numbered[0], strict=True))),
    }
    return Listing(folder, path, content, *numbered, dropped)


def corners(box: Any, width: int, height: int) -> list[float] | None:
    """Returns x1 y1 x2 y2 of a box x y width height, clipped to an image; `None` if it is invalid.

    A box is invalid if it is not four finite numbers or has no area inside of the image.
    """
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)):
        return None
    x, y, w, h = box
    x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)
    if not (x1 < x2 and y1 < y2):
        return None
    x1, y1, x2, y2 = unpack("4f", pack("4f", x1, y1, x2, y2))  # as tensors hold them
    return [x1, y1, x2, y2] if x1 < x2 and y1 < y2 else None


def named(names: dict[int, str]) -> list[dict[str, Any]]:
    """Returns categories as COCO's dictionary has them, by id."""
    return [{"id": number, "name": names[number]} for number in sorted(names)]


def outside(name: str, classes: Sequence[str], where: str) -> ValueError:
    """Returns the error of a category that is not among the classes."""
    known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
    return ValueError(f"{where} is {name!r}, none of the {len(classes)} classes ({known})")


def check_inside(name: str, where: str) -> None:
    """Refuses the name of a file that leads out of its folder."""
    path = PureWindowsPath(name)  # which knows both kinds of slash
    if path.anchor or ".." in path.parts or not path.parts:
        raise ValueError(
            f"{where}: the file name {shortened(name)} leads out of the data folder; "
            "it must be relative, without '..'"
        )


def check_files(folder: Path, images: Sequence[dict[str, Any]], path: Path) -> None:
    """Refuses images whose files are missing, after one look into each folder."""
    paths = [PurePosixPath(image["file_name"]) for image in images]
    found = {parent: _file_names(folder / parent) for parent in {name.parent for name in paths}}
    missing = [k for k, name in enumerate(paths) if name.name not in found[name.parent]]
    if missing:
        first = images[missing[0]]
        raise FileNotFoundError(
            f"{len(missing)} of the {len(images)} images of {path} are not in {folder}; the first "
            f"is {first['file_name']} (image id {first['id']}): add the files, or take the images "
            "out of the list"
        )


def _file_names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except (OSError, ValueError):  # no folder, or no name of one
        return set()


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _load(path: Path) -> dict[str, list[Any]]:
    try:
        raw: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged, or no JSON: {error}") from error
    for key in ("images", "annotations", "categories"):
        _need(raw, key, list, str(path))
    if not raw["images"]:
        raise ValueError(f"{path} lists no images")
    return raw


def _need(entry: Any, key: str, kind: type, where: str) -> Any:
    if not isinstance(entry, dict) or key not in entry:
        raise ValueError(f"{where} has no {key!r}")
    value: Any = entry[key]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{where}: {key!r} is {shortened(value)}, which is no {kind.__name__}")
    return value


def _identify(entries: list[Any], kind: str, path: Path) -> dict[int, Any]:
    """Returns the entries of a list by their ids, of which each may be there once."""
    found: dict[int, Any] = {}
    for number, entry in enumerate(entries):
        key = _need(entry, "id", int, f"{path}: number {number} of the {kind}s")
        if key in found:
            raise ValueError(f"{path}: {kind} id {key} is there twice; each needs an id of its own")
        found[key] = entry
    return found


def _categories(entries: list[Any], path: Path) -> dict[int, str]:
    """Returns the names of the categories by id."""
    names = {
        key: _need(entry, "name", str, f"{path}: category {key}")
        for key, entry in _identify(entries, "category", path).items()
    }
    twice = [name for name, times in Counter(names.values()).items() if times > 1]
    if twice or not names:
        wrong = f"more than one category {twice[0]!r}" if twice else "no categories"
        raise ValueError(f"{path} has {wrong}")
    return names


def _number(
    names: dict[int, str], classes: Sequence[str] | None, path: Path
) -> tuple[list[str], list[int]]:
    """Returns the classes and their category ids; a class that the file lacks gets a free id."""
    if classes is None:
        return [names[key] for key in sorted(names)], sorted(names)
    for key, name in names.items():
        if name not in classes:
            raise outside(name, classes, f"{path}: category {key}")
    ids = {name: key for key, name in names.items()}
    free = count(max(names) + 1)
    return list(classes), [ids[name] if name in ids else next(free) for name in classes]


def _images(entries: list[Any], path: Path) -> list[dict[str, Any]]:
    images: list[dict[str, Any]] = []
    for key, entry in _identify(entries, "image", path).items():
        where = f"{path}: image {key}"
        name = _need(entry, "file_name", str, where)
        check_inside(name, where)
        width, height = (_need(entry, side, int, where) for side in ("width", "height"))
        if min(width, height) < 1:
            raise ValueError(f"{where}: its size {width} x {height} is not positive")
        images.append({"id": key, "file_name": name, "width": width, "height": height})
    return images


def _annotations(
    entries: list[Any], path: Path, images: list[dict[str, Any]], names: dict[int, str]
) -> tuple[list[dict[str, Any]], Counter[int]]:
    """Returns the valid annotations, and the number of others by image."""
    by_id = {image["id"]: image for image in images}
    found = _identify(entries, "annotation", path)
    annotations: list[dict[str, Any]] = []
    dropped: Counter[int] = Counter()
    free = count(max([0, *found]) + 1)  # pycocotools takes a match with the id 0 for none
    for key, entry in found.items():
        where = f"{path}: annotation {key}"
        annotation = _annotation(entry, where, names)
        image = by_id.get(annotation["image_id"])
        if image is None:
            raise ValueError(f"{where} is of image {annotation['image_id']}, which is not listed")
        if corners(annotation["bbox"], image["width"], image["height"]) is None:
            dropped[image["id"]] += 1
            continue
        annotation["id"] = key if key > 0 else next(free)
        annotations.append(_with_area(annotation, entry, where))
    return annotations, dropped


def _annotation(entry: dict[str, Any], where: str, names: dict[int, str]) -> dict[str, Any]:
    category = _need(entry, "category_id", int, where)
    if category not in names:
        raise ValueError(f"{where}: the category {category} is not among those of the file")
    is_crowd = entry.get("iscrowd", 0)
    if is_crowd not in (0, 1):
        raise ValueError(f"{where}: 'iscrowd' is {shortened(is_crowd)}; it must be 0 or 1")
    return {
        "image_id": _need(entry, "image_id", int, where),
        "category_id": category,
        "bbox": _need(entry, "bbox", object, where),
        "iscrowd": int(is_crowd),
    }


def _with_area(annotation: dict[str, Any], entry: dict[str, Any], where: str) -> dict[str, Any]:
    area: Any = entry.get("area", annotation["bbox"][2] * annotation["bbox"][3])
    if not _is_number(area) or area < 0:
        raise ValueError(f"{where}: 'area' is {shortened(area)}; it must be a number, 0 or more")
    return {**annotation, "area": area}
