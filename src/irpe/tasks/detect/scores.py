"""Average precision of detections, computed by pycocotools; each image counts once."""

import contextlib
import io
import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from irpe.extras import require
from irpe.tasks.detect.boxes import as_coco
from irpe.train.task import Measure, Score

# {"image_id": int, "category_id": int, "bbox": [x, y, width, height], "score": float}
Detection = dict[str, Any]

MEASURES = (
    Measure("AP", "AP", digits=3),
    Measure("AP50", "AP50", digits=3),
    Measure("AP75", "AP75", digits=3, brief=False),
    Measure("APs", "AP small", digits=3, brief=False),
    Measure("APm", "AP medium", digits=3, brief=False),
    Measure("APl", "AP large", digits=3, brief=False),
)


def score_boxes(content: dict[str, Any], detections: Sequence[Detection]) -> Score:
    """Returns the score of detections, equal to that of pycocotools in every digit.

    Average precision is between 0 and 1, the mean over IoU thresholds from 0.5 to 0.95 and over
    classes; NaN where there are no boxes. Small objects have at most 32 x 32 pixels, large ones at
    least 96 x 96.

    Args:
        content: The images, annotations and categories, as a COCO file has them.
        detections: What was detected; the best 100 of a class count in an image.
    """
    evaluation = _evaluate(content, detections)
    names = {category["id"]: category["name"] for category in content["categories"]}
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # threshold, recall, class
    indices = {key: index for index, key in enumerate(evaluation.params.catIds)}
    classes = {name: _or_nan(precision[:, :, indices[key]].mean()) for key, name in names.items()}
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation.summarize()
    values = map(_or_nan, evaluation.stats[:6])
    details = {measure.key: value for measure, value in zip(MEASURES, values, strict=True)}
    files = {"detections.json": list(detections)}
    count = len(evaluation.params.imgIds)
    return Score(MEASURES, details, classes=classes, num_images=count, files=files)


def to_detections(
    scores: Float[Tensor, " query"],
    classes: Int64[Tensor, " query"],
    boxes: Float[Tensor, "query 4"],
    image_id: int,
    size: tuple[int, int],
    categories: Sequence[int],
) -> list[Detection]:
    """Returns what a DETR detected in an image, once per query."""
    columns = scores.tolist(), classes.tolist(), _in_pixels(boxes, size).tolist()
    return [
        {"image_id": image_id, "category_id": int(categories[c]), "bbox": box, "score": score}
        for score, c, box in zip(*columns, strict=True)
    ]


def _evaluate(content: dict[str, Any], detections: Sequence[Detection]) -> Any:
    """Returns pycocotools' evaluation, made silently and on copies."""
    truth = as_coco({**content, "annotations": [*map(dict, content["annotations"])], "info": {}})
    found = as_coco({"annotations": []})
    with contextlib.redirect_stdout(io.StringIO()):
        if detections:  # pycocotools cannot load none
            found = truth.loadRes([dict(detection) for detection in detections])
        cocoeval = require("pycocotools.cocoeval", "train")
        evaluation = cocoeval.COCOeval(truth, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _or_nan(value: Any) -> float:
    """Returns a value of pycocotools, where -1 stands for no objects."""
    return math.nan if value < 0 else float(value)


def _in_pixels(boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Returns left, top, width and height in pixels, clipped to the image."""
    bounds = torch.tensor([size[1], size[0]]).to(boxes)
    centre, half = boxes[..., :2] * bounds, boxes[..., 2:] * bounds / 2
    first, last = ((centre + side).clamp(min=0).minimum(bounds) for side in (-half, half))
    return torch.cat([first, last - first], -1)
