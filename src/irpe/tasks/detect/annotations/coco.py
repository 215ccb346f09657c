"""Boxes in the layout of COCO: one JSON file per split.

What an entry must have is a table of fields, each with a kind and a rule.
"""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, NamedTuple

from irpe.errors import UserError
from irpe.tasks.detect.annotations.listing import (
    SIDE_RULE,
    Listing,
    check_files,
    clip_box,
    is_finite_number,
    is_side,
    make_content,
    unknown_class,
)
from irpe.train.image_files import check_regular
from irpe.train.image_lists import check_relative

_MISSING: Any = object()


class _Field(NamedTuple):
    key: str
    kind: type
    is_valid: Callable[[Any], bool] = lambda _: True
    rule: str = ""
    default: Any = _MISSING


def _is_area(value: Any) -> bool:
    return is_finite_number(value) and value >= 0


_FILE = tuple(_Field(key, list) for key in ("images", "annotations", "categories"))
_ID = (_Field("id", int),)
_CATEGORY = (_Field("name", str),)
_IMAGE = (
    _Field("file_name", str),
    _Field("width", int, is_side, SIDE_RULE),
    _Field("height", int, is_side, SIDE_RULE),
)
_ANNOTATION = (
    _Field("image_id", int),
    _Field("category_id", int),
    _Field("bbox", object),  # an invalid box is left out and counted
    _Field("iscrowd", object, (0, 1).__contains__, "0 or 1", 0),
    _Field("area", object, _is_area, "a number, 0 or more", 0),
)


def read_coco(path: Path, folder: Path, classes: Sequence[str] | None) -> Listing:
    """Returns the images and boxes of a COCO file.

    A box without `iscrowd` is not a crowd, one without `area` has that of its rectangle. Boxes stay
    as they are in the file, so that they are scored as COCO's own tool scores them.

    Args:
        path: The file, instances_NAME.json.
        folder: Where the images are.
        classes: The names of the classes, in the order of the labels; `None` for those of the file.
    """
    raw = _load(path)
    names = _read_categories(raw["categories"], path)
    images = _read_images(raw["images"], path)
    check_files(folder, images, path)
    annotations, dropped = _read_annotations(raw["annotations"], path, images, names)
    labelled, ids = _order_classes(names, classes, path)
    content = make_content(images, annotations, names | dict(zip(ids, labelled, strict=True)))
    return Listing(folder, path, content, labelled, ids, dropped)


def _load(path: Path) -> dict[str, list[Any]]:
    try:
        check_regular(path)
        raw: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged, or not JSON: {error}") from error
    content = _read_fields(raw, _FILE, str(path))
    if not content["images"]:
        raise UserError(f"{path} lists no images")
    return content


def _read_fields(entry: Any, fields: Sequence[_Field], where: str) -> dict[str, Any]:
    """Returns the fields of an entry, or raises an error that names what is wrong with it."""
    values: dict[str, Any] = {}
    for field in fields:
        value = entry.get(field.key, field.default) if isinstance(entry, dict) else _MISSING
        if value is _MISSING:
            raise UserError(f"{where} has no {field.key!r}")
        is_bool = field.kind is int and isinstance(value, bool)
        if is_bool or not isinstance(value, field.kind):
            kind = field.kind.__name__
            raise UserError(
                f"{where}: {field.key!r} is {shortened(value)}, which is not of type {kind}"
            )
        if not field.is_valid(value):
            raise UserError(
                f"{where}: {field.key!r} is {shortened(value)}; it must be {field.rule}"
            )
        values[field.key] = value
    return values


def _by_id(entries: list[Any], kind: str, path: Path) -> dict[int, Any]:
    """Returns the entries of a list by their ids, which must differ."""
    found: dict[int, Any] = {}
    for index, entry in enumerate(entries):
        key = _read_fields(entry, _ID, f"{path}: entry {index} of the {kind}s")["id"]
        if key in found:
            raise UserError(f"{path}: {kind} id {key} occurs twice; each needs an id of its own")
        found[key] = entry
    return found


def _read_categories(entries: list[Any], path: Path) -> dict[int, str]:
    """Returns the names of the categories by id."""
    names: dict[int, str] = {
        key: _read_fields(entry, _CATEGORY, f"{path}: category {key}")["name"]
        for key, entry in _by_id(entries, "category", path).items()
    }
    repeated = [name for name, times in Counter(names.values()).items() if times > 1]
    if repeated or not names:
        wrong = f"more than one category {repeated[0]!r}" if repeated else "no categories"
        raise UserError(f"{path} has {wrong}")
    return names


def _order_classes(
    names: dict[int, str], classes: Sequence[str] | None, path: Path
) -> tuple[list[str], list[int]]:
    """Returns the classes and their category ids; a class that the file lacks gets a free id."""
    if classes is None:
        return [names[key] for key in sorted(names)], sorted(names)
    for key, name in names.items():
        if name not in classes:
            raise unknown_class(name, classes, f"{path}: category {key}")
    ids = {name: key for key, name in names.items()}
    free = count(max(names) + 1)
    return list(classes), [ids[name] if name in ids else next(free) for name in classes]


def _read_images(entries: list[Any], path: Path) -> list[dict[str, Any]]:
    images: list[dict[str, Any]] = []
    for key, entry in _by_id(entries, "image", path).items():
        where = f"{path}: image {key}"
        image = _read_fields(entry, _IMAGE, where)
        check_relative(image["file_name"], where)
        images.append({"id": key, **image})
    return images


def _read_annotations(
    entries: list[Any], path: Path, images: list[dict[str, Any]], names: dict[int, str]
) -> tuple[list[dict[str, Any]], Counter[int]]:
    """Returns the valid annotations, and the number of others by image."""
    by_id = {image["id"]: image for image in images}
    found = _by_id(entries, "annotation", path)
    annotations: list[dict[str, Any]] = []
    dropped: Counter[int] = Counter()
    free = count(max([0, *found]) + 1)  # pycocotools takes a match with the id 0 for none
    for key, entry in found.items():
        where = f"{path}: annotation {key}"
        annotation = _read_fields(entry, _ANNOTATION, where)
        image = by_id.get(annotation["image_id"])
        if image is None:
            raise UserError(f"{where} is of image {annotation['image_id']}, which is not listed")
        if annotation["category_id"] not in names:
            raise UserError(
                f"{where} has category {annotation['category_id']}, which is not listed"
            )
        box = annotation["bbox"]
        if clip_box(box, image["width"], image["height"]) is None:
            dropped[image["id"]] += 1
            continue
        area = annotation["area"] if "area" in entry else box[2] * box[3]
        crowd = int(annotation["iscrowd"])
        annotation |= {"id": key if key > 0 else next(free), "iscrowd": crowd, "area": area}
        annotations.append(annotation)
    return annotations, dropped
