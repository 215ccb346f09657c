"""Images with boxes, from a folder in the layout of COCO or Pascal VOC."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from irpe.errors import UserError
from irpe.tasks.detect.annotations.coco import read_coco
from irpe.tasks.detect.annotations.layout import find_annotations
from irpe.tasks.detect.annotations.listing import Listing, clip_box
from irpe.tasks.detect.annotations.voc import read_voc
from irpe.train.image_files import UNREADABLE, BrokenImageError, check_regular, convert_mode
from irpe.train.image_lists import held_out_part


@dataclass(frozen=True)
class Target:
    """The objects in an image.

    Args:
        boxes: x1 y1 x2 y2 of each box, in pixels, inside the image. Crowds are left out.
        labels: The index of each one's class.
    """

    boxes: Tensor
    labels: Tensor


class BoxSource:
    """Images that can be read one by one, with the boxes in them.

    Args:
        listing: What the annotation files say.

    Attributes:
        classes: The names of the classes, in the order of the labels.
        categories: The category id of each class in `content`.
        content: COCO's dictionary of these images, for pycocotools: boxes as they are in the files,
            crowds among them, invalid ones left out.
        num_dropped: How many invalid boxes were left out.
    """

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.classes = listing.classes
        self.categories = listing.categories
        self.content = listing.content
        self.num_dropped = listing.dropped.total()
        self._annotations: dict[int, list[Any]] = defaultdict(list)
        for annotation in self.content["annotations"]:
            self._annotations[annotation["image_id"]].append(annotation)
        self._labels = {key: label for label, key in enumerate(self.categories)}

    def __len__(self) -> int:
        return len(self.content["images"])

    def read(self, index: int) -> tuple[Image.Image, Target]:
        """Returns an image and the objects in it."""
        recorded = self.content["images"][index]
        name = f"{self.filename(index)} (image id {recorded['id']})"
        size = recorded["width"], recorded["height"]
        try:
            check_regular(self.filename(index))
            with Image.open(self.filename(index)) as image:
                if image.size == size:
                    image = convert_mode(image, "RGB")
        except UNREADABLE as error:
            raise BrokenImageError(f"{name} cannot be read: {error}") from error
        if image.size != size:
            raise UserError(
                f"{name} has {image.size[0]} x {image.size[1]} pixels, but {self.listing.path} "
                f"says {size[0]} x {size[1]}: its boxes belong to another image"
            )
        return image, self._target(recorded)

    def filename(self, index: int) -> str:
        """Returns the file of an image."""
        return str(self.listing.folder / self.content["images"][index]["file_name"])

    def image_id(self, index: int) -> int:
        """Returns the id of an image in `content`."""
        return self.content["images"][index]["id"]

    def size(self, index: int) -> tuple[int, int]:
        """Returns the height and width of an image."""
        recorded = self.content["images"][index]
        return recorded["height"], recorded["width"]

    def first(self, count: int) -> "BoxSource":
        """Returns a source of the first images only, all where there are fewer."""
        if count < 1:
            raise UserError(f"the first {count} images cannot be taken; take 1 or more")
        return self.subset(range(min(count, len(self))))

    def subset(self, indices: Sequence[int]) -> "BoxSource":
        """Returns a source of some of the images."""
        images = [self.content["images"][index] for index in indices]
        ids = {image["id"] for image in images}
        annotations = [a for a in self.content["annotations"] if a["image_id"] in ids]
        content = {**self.content, "images": images, "annotations": annotations}
        dropped = Counter({key: n for key, n in self.listing.dropped.items() if key in ids})
        return BoxSource(replace(self.listing, content=content, dropped=dropped))

    def _target(self, image: dict[str, Any]) -> Target:
        found = [a for a in self._annotations.get(image["id"], []) if not a["iscrowd"]]
        boxes = [clip_box(a["bbox"], image["width"], image["height"]) for a in found]
        labels = [self._labels[a["category_id"]] for a in found]
        return Target(
            torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
            torch.tensor(labels, dtype=torch.int64),
        )


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
    path, images = find_annotations(data, split, holdout)
    if images is not None:
        return BoxSource(read_coco(path, images, classes))
    source = BoxSource(read_voc(Path(data), path, classes))
    return source.subset(held_out_part(len(source), holdout, split)) if holdout else source
