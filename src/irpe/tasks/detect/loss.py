"""DETR's loss, with transformers' matching and terms, the same however a batch is split.

transformers divides by the boxes of a process and, under Accelerate, by the number of processes a
second time. Here every term is a sum over the images at hand, divided by what the whole step has:
the mean over micro-batches and processes is then the loss of the batch on one device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DetrConfig
from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss


class Normalizer(NamedTuple):
    """What the sums of a micro-batch are divided by, so that their mean is the step's loss.

    Args:
        boxes: The boxes of the step, per micro-batch.
        weight: The class weights of all its queries, per micro-batch.
    """

    boxes: float
    weight: float


def count_targets(labels: list[Tensor], num_queries: int) -> Tensor:
    """Returns the number of boxes, of boxes that a query can match, and of queries."""
    sizes = [len(label) for label in labels]
    matched = sum(min(size, num_queries) for size in sizes)
    return torch.tensor([sum(sizes), matched, num_queries * len(sizes)], dtype=torch.float64)


def make_normalizer(counts: Tensor, num_micro_batches: int, no_object: float) -> Normalizer:
    """Returns what each micro-batch divides by."""
    boxes, matched, queries = (counts / num_micro_batches).tolist()
    weight = matched + no_object * (queries - matched)
    return Normalizer(max(boxes, 1.0 / num_micro_batches), weight)


def detection_loss(
    logits: Float[Tensor, "layer image query class"],
    boxes: Float[Tensor, "layer image query 4"],
    targets: Sequence[dict[str, Tensor]],
    normalizer: Normalizer,
    config: DetrConfig,
) -> Tensor:
    """Returns the loss of a micro-batch, summed over the layers of the decoder.

    Args:
        logits: The class logits, "no object" last.
        boxes: The boxes: centre x, centre y, width and height, relative to the image.
        targets: For each image its "class_labels" and "boxes".
        normalizer: What the sums are divided by.
        config: Has the costs and coefficients.
    """
    settings: Any = config
    matcher = HungarianMatcher(settings.class_cost, settings.bbox_cost, settings.giou_cost)
    criterion = ImageLoss(matcher, settings.num_labels, settings.eos_coefficient, [])
    criterion = criterion.to(logits.device)
    with torch.autocast(logits.device.type, enabled=False):
        terms = [
            _terms(criterion, of_layer.float(), b.float(), targets, normalizer)
            for of_layer, b in zip(logits, boxes, strict=True)
        ]
    sums = {name: torch.stack([term[name] for term in terms]).sum() for name in terms[0]}
    return (
        sums["loss_ce"]
        + settings.bbox_loss_coefficient * sums["loss_bbox"]
        + settings.giou_loss_coefficient * sums["loss_giou"]
    )


def _terms(
    criterion: ImageLoss,
    logits: Tensor,
    boxes: Tensor,
    targets: Sequence[dict[str, Tensor]],
    normalizer: Normalizer,
) -> dict[str, Tensor]:
    """Returns the terms of one layer."""
    outputs = {"logits": logits, "pred_boxes": boxes}
    indices = criterion.matcher(outputs, targets)
    matched = sum(len(queries) for queries, _ in indices)
    weight = matched + criterion.eos_coef * (logits.shape[0] * logits.shape[1] - matched)
    terms = criterion.loss_boxes(outputs, targets, indices, normalizer.boxes)
    mean = criterion.loss_labels(outputs, targets, indices, normalizer.boxes)["loss_ce"]
    return {**terms, "loss_ce": mean * weight / normalizer.weight}
