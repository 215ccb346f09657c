"""Average precision of detections, computed by pycocotools; each image counts once."""

import contextlib
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from jaxtyping import Float
from torch import Tensor

from irpe.errors import UserError
from irpe.extras import require

# {"image_id": int, "category_id": int, "bbox": [x, y, width, height], "score": float}
Detection = dict[str, Any]
_FIELDS = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")


@dataclass(frozen=True)
class BoxScore:
    """How well objects are detected, between 0 and 1; NaN where there are none.

    Args:
        ap: Average precision, the mean over IoU thresholds from 0.5 to 0.95 and over classes.
        ap50: The same at the threshold 0.5.
        ap75: The same at the threshold 0.75.
        ap_small: `ap` of objects of at most 32 x 32 pixels.
        ap_medium: `ap` of objects between these sizes.
        ap_large: `ap` of objects of at least 96 x 96 pixels.
        num_images: The images that count.
    """

    ap: float
    ap50: float
    ap75: float
    ap_small: float
    ap_medium: float
    ap_large: float
    num_images: int

    def row(self) -> dict[str, float]:
        """Returns the columns of the run's table."""
        return {
            "AP": self.ap,
            "AP50": self.ap50,
            "AP75": self.ap75,
            "APs": self.ap_small,
            "APm": self.ap_medium,
            "APl": self.ap_large,
        }


def score_boxes(content: dict[str, Any], detections: Sequence[Detection]) -> BoxScore:
    """Returns the score of detections, equal to that of pycocotools in every digit.

    Args:
        content: The images, annotations and categories, as a COCO file has them.
        detections: What was detected; the best 100 of a class count in an image.
    """
    return _score(_evaluate(content, detections))


def score_with_classes(
    content: dict[str, Any], detections: Sequence[Detection]
) -> tuple[BoxScore, dict[str, float]]:
    """Returns the score, and the average precision of each class; nan where it has no boxes.

    Args:
        content: The images, annotations and categories, as a COCO file has them.
        detections: What was detected in the images.
    """
    evaluation = _evaluate(content, detections)
    names = {category["id"]: category["name"] for category in content["categories"]}
    if len(set(names.values())) < len(names):
        raise UserError(f"two categories have one name: {', '.join(sorted(names.values()))}")
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # threshold, recall, class
    indices = {key: index for index, key in enumerate(evaluation.params.catIds)}
    classes = {name: _or_nan(precision[:, :, indices[key]].mean()) for key, name in names.items()}
    return _score(evaluation), classes


def to_detections(
    logits: Float[Tensor, "batch query class"],
    boxes: Float[Tensor, "batch query 4"],
    image_ids: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    categories: Sequence[int],
) -> list[Detection]:
    """Returns what a DETR detected, once per query: its best class other than "no object".

    Args:
        logits: The scores of the classes, "no object" last.
        boxes: Centre x, centre y, width and height, relative to the image.
        image_ids: The ids of the images.
        sizes: The height and width of each image as it is stored.
        categories: The category id of each class.
    """
    _check_outputs(logits, boxes, image_ids, sizes, categories)
    scores, classes = logits.float().softmax(-1)[..., :-1].max(-1)
    placed = _in_pixels(boxes.float(), sizes)
    found = zip(image_ids, classes.tolist(), placed.tolist(), scores.tolist(), strict=True)
    return [
        {"image_id": int(image), "category_id": int(categories[c]), "bbox": box, "score": score}
        for image, *of_image in found
        for c, box, score in zip(*of_image, strict=True)
    ]


def gather_detections(own: list[Detection], accelerator: Accelerator) -> list[Detection]:
    """Returns the detections of all processes; an image that several saw is taken from the first.

    Args:
        own: The detections of this process.
        accelerator: Knows the processes.
    """
    if accelerator.num_processes == 1:
        return own
    gathered: list[Detection] = []
    seen: set[int] = set()
    for of_process in gather_object([own]):
        new = [detection for detection in of_process if detection["image_id"] not in seen]
        seen.update(detection["image_id"] for detection in new)
        gathered += new
    return gathered


def _evaluate(content: dict[str, Any], detections: Sequence[Detection]) -> Any:
    """Returns pycocotools' evaluation, made silently and on copies."""
    coco, cocoeval = (require(f"pycocotools.{name}", "train") for name in ("coco", "cocoeval"))
    _check_content(content)
    _check_detections(content, detections)
    with contextlib.redirect_stdout(io.StringIO()):
        truth, found = coco.COCO(), coco.COCO()
        found.dataset = {"annotations": []}
        truth.dataset = {**content, "annotations": [*map(dict, content["annotations"])], "info": {}}
        truth.createIndex()
        if detections:  # pycocotools cannot load none
            found = truth.loadRes([dict(detection) for detection in detections])
        evaluation = cocoeval.COCOeval(truth, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _score(evaluation: Any) -> BoxScore:
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.summarize()
    return BoxScore(
        *map(_or_nan, evaluation.stats[:6]),
        num_images=len(evaluation.params.imgIds),
    )


def _or_nan(value: Any) -> float:
    """Returns a value of pycocotools, where -1 stands for no objects."""
    return math.nan if value < 0 else float(value)


def _check_content(content: dict[str, Any]) -> None:
    """Raises an error for annotations that pycocotools would count wrongly, or not at all."""
    seen: set[int] = set()
    for annotation in content["annotations"]:
        missing = [field for field in _FIELDS if field not in annotation]
        if missing:
            name = annotation.get("id", "without an id")
            raise UserError(f"annotation {name} has no {missing[0]!r}: it needs {_listed(_FIELDS)}")
        key = annotation["id"]
        if key in seen or key < 1:
            fault = "occurs twice" if key in seen else "is not positive"
            raise UserError(f"the annotation id {key} {fault}: count ids from 1")
        seen.add(key)


def _check_detections(content: dict[str, Any], detections: Sequence[Detection]) -> None:
    for field, owners in (("image_id", "images"), ("category_id", "categories")):
        known = {owner["id"] for owner in content[owners]}
        unknown = {detection[field] for detection in detections} - known
        if unknown:
            raise UserError(
                f"detections have the {field} {_listed(sorted(unknown))}, which is not among the "
                f"{len(known)} {owners}: {_listed(sorted(known))}"
            )
    for detection in detections:
        if not all(map(math.isfinite, (*detection["bbox"], detection["score"]))):
            raise UserError(f"a detection in image {detection['image_id']} is not finite")


def _check_outputs(
    logits: Tensor,
    boxes: Tensor,
    image_ids: Sequence[int],
    sizes: Sequence[tuple[int, int]],
    categories: Sequence[int],
) -> None:
    batch, queries, classes = logits.shape
    if boxes.shape != (batch, queries, 4):
        raise UserError(f"boxes have the shape {(*boxes.shape,)}, not {(batch, queries, 4)}")
    if not len(image_ids) == len(sizes) == batch:
        raise UserError(f"{batch} images have {len(image_ids)} ids and {len(sizes)} sizes")
    if len(categories) != classes - 1:
        raise UserError(
            f"{len(categories)} categories for {classes} logits: pass {classes - 1}, as the last "
            "logit stands for no object"
        )


def _in_pixels(boxes: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Returns left, top, width and height in pixels, clipped to the image."""
    bounds = torch.tensor([[[width, height]] for height, width in sizes]).to(boxes)
    centre, half = boxes[..., :2] * bounds, boxes[..., 2:] * bounds / 2
    first, last = ((centre + side).clamp(min=0).minimum(bounds) for side in (-half, half))
    return torch.cat([first, last - first], -1)


def _listed(values: Iterable[Any]) -> str:
    """Returns the first ten values as text."""
    texts = list(map(str, values))
    return ", ".join(texts[:10]) + (", ..." if len(texts) > 10 else "")
