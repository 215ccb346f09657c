"""Images with boxes, from a folder in the layout of COCO or Pascal VOC: both are COCO's dictionary.

COCO has one JSON file per split. A box without `iscrowd` is not a crowd, one without `area` has
that of its rectangle. Boxes stay as they are in the file, so that they are scored as COCO's own
tool scores them; invalid ones are left out and counted.

Pascal VOC has one XML file per image. Coordinates are taken as they are: xmin ymin xmax ymax are
the corners of a box, counted from 0, as the tools that write such files today mean them. In
Pascal's own files pixels count from 1 and the last one is inside, so that their boxes lack one row
of pixels above and one column to the left. Objects marked `difficult` are treated as crowds of
COCO: they are not trained on, and it changes no score whether they are detected.
"""

import contextlib
import io
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from pathlib import Path, PurePosixPath
from reprlib import repr as shortened
from struct import pack, unpack
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from irpe.errors import MissingFileError, UserError
from irpe.extras import require
from irpe.files import check_regular
from irpe.train.images import (
    check_lists,
    check_relative,
    convert_mode,
    files_by_name,
    held_out_part,
    read_image,
    read_names,
)

if TYPE_CHECKING:
    from PIL import Image
    from torch import Tensor

_MAX_SIDE = 10**6  # pixels: no reader of images takes more, and boxes in float32 stay exact


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_side(value: Any) -> bool:
    return _is_integer(value) and 1 <= value <= _MAX_SIDE


def _is_finite(value: Any) -> bool:
    try:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and math.isfinite(value)
    except OverflowError:
        return False


_Rule = tuple[Callable[[Any], bool], str]
_INTEGER: _Rule = (_is_integer, "an integer")
_TEXT: _Rule = (lambda value: isinstance(value, str), "text")
_LIST: _Rule = (lambda value: isinstance(value, list), "a list")
_SIDE: _Rule = (_is_side, f"an integer from 1 to {_MAX_SIDE}")
_ANY: _Rule = (lambda _: True, "")
_FILE = {"images": _LIST, "annotations": _LIST, "categories": _LIST}
_ID = {"id": _INTEGER}
_CATEGORY = {"name": _TEXT}
_IMAGE = {"file_name": _TEXT, "width": _SIDE, "height": _SIDE}
_ANNOTATION: dict[str, _Rule] = {
    "image_id": _INTEGER,
    "category_id": _INTEGER,
    "bbox": _ANY,  # an invalid box is left out and counted
    "iscrowd": ((0, 1).__contains__, "0 or 1"),
    "area": (lambda value: _is_finite(value) and value >= 0, "a number, 0 or more"),
}


@dataclass(frozen=True)
class Target:
    """The objects in an image.

    Args:
        boxes: x1 y1 x2 y2 of each box, in pixels, inside the image. Crowds are left out.
        labels: The index of each one's class.
    """

    boxes: "Tensor"
    labels: "Tensor"


@dataclass(frozen=True)
class BoxSource:
    """Images that can be read one by one, with the boxes in them.

    Args:
        folder: Where the images are.
        path: The file that lists them.
        content: COCO's dictionary of these images, for pycocotools: boxes as they are in the files,
            crowds among them, invalid ones left out.
        classes: The names of the classes, in the order of the labels.
        categories: The category id of each class in `content`.
        dropped: How many invalid boxes were left out, by image id.
    """

    folder: Path
    path: Path
    content: dict[str, Any]
    classes: list[str]
    categories: list[int]
    dropped: Mapping[int, int]

    @cached_property
    def coco(self) -> Any:
        """Pycocotools' index of `content`."""
        return as_coco(self.content)

    @property
    def num_dropped(self) -> int:
        """How many invalid boxes were left out."""
        return sum(self.dropped.values())

    def __len__(self) -> int:
        return len(self.content["images"])

    def read(self, index: int) -> "tuple[Image.Image, Target]":
        """Returns an image and the objects in it."""
        recorded = self.content["images"][index]
        name = f"{self.filename(index)} (image id {recorded['id']})"
        image = read_image(self.filename(index), lambda found: convert_mode(found, "RGB"), name)
        if image.size != (recorded["width"], recorded["height"]):
            raise UserError(
                f"{name} has {image.width} x {image.height} pixels, but {self.path} says "
                f"{recorded['width']} x {recorded['height']}: its boxes belong to another image"
            )
        return image, self._target(recorded)

    def _target(self, image: dict[str, Any]) -> Target:
        import torch

        found = [a for a in self.coco.imgToAnns[image["id"]] if not a["iscrowd"]]
        boxes = [clip_box(a["bbox"], image["width"], image["height"]) for a in found]
        labels = [self.categories.index(a["category_id"]) for a in found]
        return Target(
            torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            torch.tensor(labels, dtype=torch.int64),
        )

    def filename(self, index: int) -> str:
        """Returns the file of an image."""
        return str(self.folder / self.content["images"][index]["file_name"])

    def image_id(self, index: int) -> int:
        """Returns the id of an image in `content`."""
        return self.content["images"][index]["id"]

    def size(self, index: int) -> tuple[int, int]:
        """Returns the height and width of an image."""
        recorded = self.content["images"][index]
        return recorded["height"], recorded["width"]

    def subset(self, indices: Sequence[int]) -> "BoxSource":
        """Returns a source of some of the images."""
        images = [self.content["images"][index] for index in indices]
        ids = {image["id"] for image in images}
        annotations = [a for a in self.content["annotations"] if a["image_id"] in ids]
        content = {**self.content, "images": images, "annotations": annotations}
        dropped = {key: number for key, number in self.dropped.items() if key in ids}
        return replace(self, content=content, dropped=dropped)


def as_coco(content: dict[str, Any]) -> Any:
    """Returns pycocotools' index of COCO's dictionary, made silently."""
    coco = require("pycocotools.coco", "train").COCO()
    coco.dataset = content
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
    return coco


def open_boxes(
    data: str, split: str, classes: Sequence[str] | None = None, holdout: float = 0.0
) -> BoxSource:
    """Returns the images of a split, with their boxes.

    Args:
        data: A folder in the layout of COCO or Pascal VOC (`find_annotations`).
        split: For example "train".
        classes: The names of the classes, in the order of the labels; `None` for those of the
            split, or of all images where some are held out.
        holdout: The fraction that is held out as "val" in Pascal VOC's layout without lists.
    """
    path, folder = find_annotations(data, split, holdout)
    is_voc = folder is None
    folder = folder or Path(data) / "JPEGImages"
    content = voc_to_coco(Path(data), path, classes) if is_voc else _read_coco(path)
    _check_files(folder, content["images"], path)
    annotations, dropped = _split_off_invalid(content)
    if is_voc:
        annotations = [{**each, "id": number} for number, each in enumerate(annotations, 1)]
    names = {category["id"]: category["name"] for category in content["categories"]}
    ids = sorted(names)
    if classes is not None:
        for key, name in names.items():
            if name not in classes:
                raise _unknown_class(name, classes, f"{path}: category {key}")
        by_name, free = {name: key for key, name in names.items()}, count(max(names) + 1)
        ids = [by_name[name] if name in by_name else next(free) for name in classes]
        names = dict(zip(ids, classes, strict=True))
    content = {
        "info": {},
        "images": content["images"],
        "annotations": annotations,
        "categories": [{"id": key, "name": names[key]} for key in sorted(names)],
    }
    source = BoxSource(folder, path, content, [names[key] for key in ids], ids, dropped)
    return source.subset(held_out_part(len(source), holdout, split)) if holdout else source


def _split_off_invalid(content: dict[str, Any]) -> tuple[list[dict[str, Any]], Counter[int]]:
    """Returns the annotations with a box inside its image, and the number of others by image."""
    images = {image["id"]: image for image in content["images"]}
    kept: list[dict[str, Any]] = []
    dropped: Counter[int] = Counter()
    for annotation in content["annotations"]:
        image = images[annotation["image_id"]]
        if clip_box(annotation["bbox"], image["width"], image["height"]) is None:
            dropped[image["id"]] += 1
            continue
        area = annotation["bbox"][2] * annotation["bbox"][3]
        kept.append({**annotation, "area": annotation.get("area", area)})
    return kept, dropped


def clip_box(box: Any, width: int, height: int) -> list[float] | None:
    """Returns x1 y1 x2 y2 of a box x y width height, clipped to an image; `None` if it is invalid.

    A box is invalid if it is not four finite numbers or has no area inside the image.
    """
    if not isinstance(box, list) or len(box) != 4 or not all(map(_is_finite, box)):
        return None
    x, y, w, h = box
    x1, y1, x2, y2 = max(x, 0), max(y, 0), min(x + w, width), min(y + h, height)
    if not (x1 < x2 and y1 < y2):
        return None
    x1, y1, x2, y2 = unpack("4f", pack("4f", x1, y1, x2, y2))  # as tensors hold them
    return [x1, y1, x2, y2] if x1 < x2 and y1 < y2 else None


def _unknown_class(name: str, classes: Sequence[str], where: str) -> UserError:
    known = ", ".join(classes[:10]) + (", ..." if len(classes) > 10 else "")
    return UserError(f"{where} is {name!r}, none of the {len(classes)} classes ({known})")


def _check_files(folder: Path, images: Sequence[dict[str, Any]], path: Path) -> None:
    """Refuses images whose files are missing; each folder is listed once."""
    found: dict[Path, set[str]] = {}
    missing: list[dict[str, Any]] = []
    for image in images:
        name = PurePosixPath(image["file_name"])
        parent = folder / name.parent
        if parent not in found:
            found[parent] = set(os.listdir(parent)) if parent.is_dir() else set()
        if name.name not in found[parent]:
            missing.append(image)
    if missing:
        raise MissingFileError(
            f"{len(missing)} of the {len(images)} images of {path} are not in {folder}; the first "
            f"is {missing[0]['file_name']} (image id {missing[0]['id']}): add the files, or take "
            "the images out of the list"
        )


def find_annotations(data: str, split: str, holdout: float = 0.0) -> tuple[Path, Path | None]:
    """Returns the annotation file of a split, and COCO's folder of images; Pascal VOC has none.

    Where images of Pascal VOC are held out it is the folder of all annotations.

    Args:
        data: A folder. COCO: annotations/instances_NAME.json, where NAME starts with the split, and
            images in NAME/, images/NAME/ or images/. Pascal VOC: ImageSets/Main/SPLIT.txt,
            Annotations/ and JPEGImages/.
        split: For example "train".
        holdout: The fraction that is held out as "val" in Pascal VOC's layout without lists.
    """
    folder = Path(data)
    if not folder.is_dir():
        raise MissingFileError(f"data {data!r} is not a folder")
    files = (folder / "annotations").glob("instances_*.json")
    coco = {path.stem.removeprefix("instances_"): path for path in files}
    lists, annotations = folder / "ImageSets" / "Main", folder / "Annotations"
    voc = {path.stem: path for path in lists.glob("*.txt")}
    if annotations.is_dir() and not coco:
        check_lists([*voc], lists, holdout)
    elif holdout:
        raise UserError(
            f"--holdout is for Pascal VOC without lists of images: {data} has no Annotations/ or "
            "those of COCO, leave it out"
        )
    if holdout:
        return annotations, None
    if bool(coco) == bool(voc):
        has = "both" if coco else "neither"
        raise (UserError if coco else MissingFileError)(
            f"{data} has {has} annotations/instances_*.json (COCO) {'and' if coco else 'nor'} "
            "ImageSets/Main/*.txt (Pascal VOC); one of them is needed"
        )
    found = coco or voc
    fitting = [name for name in coco if split and name.startswith(split)]
    name = split if split in found else fitting[0] if len(fitting) == 1 else None
    if name is None:
        where = next(iter(found.values())).parent
        raise (UserError if fitting else MissingFileError)(
            f"{where} has {len(fitting) or 'no'} files for the split {split!r}, and one is needed; "
            f"it has {', '.join(sorted(path.name for path in found.values()))}"
        )
    if voc:
        return voc[name], None
    candidates = [folder / name, folder / "images" / name, folder / "images"]
    for candidate in candidates:
        if candidate.is_dir():
            return coco[name], candidate
    looked_for = ", ".join(f"{candidate}/" for candidate in candidates)
    raise MissingFileError(f"there are no images of {name}: looked for {looked_for}")


def _read_coco(path: Path) -> dict[str, Any]:
    """Returns what is used of a COCO file, or raises an error that names what is wrong with it."""
    check_regular(path)
    try:
        raw: Any = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged, or not JSON: {error}") from error
    _take(raw, _FILE, str(path))
    categories = _by_id(raw["categories"], "category", path, _CATEGORY)
    images = _by_id(raw["images"], "image", path, _IMAGE)
    found = _by_id(raw["annotations"], "annotation", path, _ANNOTATION, {"iscrowd": 0})
    names = Counter(category["name"] for category in categories.values())
    if not images or not names or max(names.values()) > 1:
        double = [name for name, times in names.items() if times > 1]
        raise UserError(
            f"{path} has {len(images)} images and {len(names)} categories, at least 1 of each is "
            f"needed{f', and more than one is called {double[0]!r}' if double else ''}"
        )
    for key, image in images.items():
        check_relative(image["file_name"], f"{path}: image {key}")
    free = count(max([0, *found]) + 1)  # pycocotools takes a match with the id 0 for none
    for key, annotation in found.items():
        for field, known in (("image_id", images), ("category_id", categories)):
            if annotation[field] not in known:
                raise UserError(
                    f"{path}: annotation {key} has the {field} {annotation[field]}, which is not "
                    "listed"
                )
        annotation |= {"id": key if key > 0 else next(free), "iscrowd": int(annotation["iscrowd"])}
    listed = {"categories": categories, "images": images, "annotations": found}
    return {name: list(entries.values()) for name, entries in listed.items()}


def _by_id(
    entries: list[Any],
    kind: str,
    path: Path,
    rules: Mapping[str, _Rule],
    defaults: Mapping[str, Any] | None = None,
) -> dict[int, dict[str, Any]]:
    """Returns the fields of the entries of a list by their ids, which must differ."""
    found: dict[int, dict[str, Any]] = {}
    for index, entry in enumerate(entries):
        key = _take(entry, _ID, f"{path}: entry {index} of the {kind}s")["id"]
        if key in found:
            raise UserError(f"{path}: {kind} id {key} occurs twice; each needs an id of its own")
        own = {name: rule for name, rule in rules.items() if name != "area" or name in entry}
        values = _take({**(defaults or {}), **entry}, own, f"{path}: {kind} {key}")
        found[key] = {"id": key, **values}
    return found


def _take(entry: Any, rules: Mapping[str, _Rule], where: str) -> dict[str, Any]:
    """Returns the fields of an entry that there are rules for, which it must keep to."""
    for name, (is_valid, rule) in rules.items():
        if not isinstance(entry, dict) or name not in entry:
            raise UserError(f"{where} has no {name!r}")
        if not is_valid(entry[name]):
            raise UserError(f"{where}: {name!r} is {shortened(entry[name])}; it must be {rule}")
    return {name: entry[name] for name in rules}


def voc_to_coco(data: Path, path: Path, classes: Sequence[str] | None) -> dict[str, Any]:
    """Returns the annotations of Pascal VOC as COCO's dictionary; ids count from 1.

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
    files = files_by_name(data / "JPEGImages")
    images: list[dict[str, Any]] = []
    objects: list[tuple[str, str, dict[str, Any]]] = []
    for number, name in enumerate(names, 1):
        file = data / "Annotations" / f"{name}.xml"
        root = _parse(file, path)
        check_relative(root.findtext("filename") or file.name, str(file))
        size = {side: _side(root, f"size/{side}", file) for side in ("width", "height")}
        image = files[name].name if name in files else f"{name}.jpg"
        images.append({"id": number, "file_name": image, **size})
        for index, element in enumerate(root.iterfind("object"), 1):
            where = f"{file}: object {index}"
            objects.append((where, *_object(element, where, number)))
    chosen = sorted({name for _, name, _ in objects}) if classes is None else list(classes)
    if not chosen:
        raise UserError(f"none of the {len(images)} images of {path} has an object in it")
    for where, name, annotation in objects:
        if name not in chosen:
            raise _unknown_class(name, chosen, where)
        annotation["category_id"] = chosen.index(name) + 1
    categories = [{"id": number, "name": name} for number, name in enumerate(chosen, 1)]
    annotations = [annotation for _, _, annotation in objects]
    return {"images": images, "annotations": annotations, "categories": categories}


def _parse(path: Path, listed_in: Path) -> Any:
    if not path.exists():
        raise MissingFileError(f"{path} is missing, but {listed_in} lists its image")
    check_regular(path)
    data = path.read_bytes()
    try:
        if b"\0" in data or b"<!DOCTYPE" in data:  # 16-bit characters would hide the latter
            raise UserError("a document type and 16-bit characters are refused")
        return ElementTree.fromstring(data)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise UserError(f"{path} is damaged, or not XML: {error}") from error


def _side(root: Any, tag: str, path: Path) -> int:
    text = _text(root, tag, str(path))
    if not (text.isdecimal() and len(text) <= len(str(_MAX_SIDE)) and _is_side(int(text))):
        raise UserError(f"{path}: {tag} is {shortened(text)}; it must be {_SIDE[1]}")
    return int(text)


def _text(element: Any, tag: str, where: str) -> str:
    text = element.findtext(tag)
    if text is None:
        raise UserError(f"{where} has no {tag}")
    return text.strip()


def _object(element: Any, where: str, image_id: int) -> tuple[str, dict[str, Any]]:
    """Returns the class of an object, and its annotation without that."""
    name = _text(element, "name", where)
    difficult = (element.findtext("difficult") or "0").strip()
    if not name or difficult not in ("0", "1"):
        wrong = f"difficult is {difficult!r}; it must be 0 or 1" if name else "it has no name"
        raise UserError(f"{where}: {wrong}")
    sides = ("xmin", "ymin", "xmax", "ymax")
    try:
        x1, y1, x2, y2 = (float(_text(element, f"bndbox/{side}", where)) for side in sides)
    except UserError:
        raise
    except ValueError:
        x1 = y1 = x2 = y2 = math.nan  # the box is invalid
    box = [x1, y1, x2 - x1, y2 - y1]
    return name, {"image_id": image_id, "bbox": box, "iscrowd": int(difficult)}
