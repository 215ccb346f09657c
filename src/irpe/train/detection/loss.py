"""DETR's loss, with transformers' matching and terms, the same however a batch is shared.

transformers divides by the boxes of a process and, under Accelerate, by the number of processes a
second time. Here every term is a sum over the images at hand, divided by what the whole step has:
the mean over parts and processes is then the loss of the batch on one device.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.loss.loss_for_object_detection import HungarianMatcher, ImageLoss


class Share(NamedTuple):
    """What the losses of a part are divided by: its share of the whole step.

    Args:
        boxes: The boxes of a step, divided by its parts and processes.
        weight: The same of the classification's weights, one for each query.
    """

    boxes: float
    weight: float


def count_targets(labels: list[Tensor], num_queries: int) -> Tensor:
    """Returns the boxes, those that a query can be matched to, and the queries of some images."""
    sizes = [len(label) for label in labels]
    matched = sum(min(size, num_queries) for size in sizes)
    return torch.tensor([sum(sizes), matched, num_queries * len(sizes)], dtype=torch.float64)


def share_of(counts: Tensor, parts: int, no_object: float) -> Share:
    """Returns what a part divides by.

    Args:
        counts: What `count_targets` returned, added up over a step.
        parts: How many parts the step has, over all processes.
        no_object: The weight of a query without an object in the classification.
    """
    boxes, matched, queries = (counts / parts).tolist()
    return Share(max(boxes, 1.0 / parts), matched + no_object * (queries - matched))


@torch.compiler.disable  # the matching is not PyTorch's
def detection_loss(
    logits: Tensor,
    labels: list[dict[str, Any]],
    device: torch.device,
    pred_boxes: Tensor,
    config: Any,
    outputs_class: Tensor,
    outputs_coord: Tensor,
    **_: Any,
) -> tuple[Tensor, dict[str, Tensor], None]:
    """Returns the loss as transformers' DETR asks for it, over all layers of the decoder.

    Args:
        logits: The classes of the last layer, image by image and query by query.
        labels: For each image: class_labels, boxes, and the share, which is the same in all.
        device: Where it is computed.
        pred_boxes: The boxes of the last layer.
        config: The configuration of transformers' DETR.
        outputs_class: The classes of all layers.
        outputs_coord: The boxes of all layers.
    """
    matcher = HungarianMatcher(config.class_cost, config.bbox_cost, config.giou_cost)
    criterion = ImageLoss(matcher, config.num_labels, config.eos_coefficient, []).to(device)
    layers = [(logits, pred_boxes), *zip(outputs_class[:-1], outputs_coord[:-1], strict=True)]
    with torch.autocast(device.type, enabled=False):
        terms = [_terms(criterion, classes.float(), b.float(), labels) for classes, b in layers]
    sums = {name: torch.stack([term[name] for term in terms]).sum() for name in terms[0]}
    total = (
        sums["loss_ce"]
        + config.bbox_loss_coefficient * sums["loss_bbox"]
        + config.giou_loss_coefficient * sums["loss_giou"]
    )
    return total, sums, None


def _terms(
    criterion: ImageLoss, logits: Tensor, boxes: Tensor, labels: list[dict[str, Any]]
) -> dict[str, Tensor]:
    outputs = {"logits": logits, "pred_boxes": boxes}
    share: Share = labels[0]["share"]
    indices = criterion.matcher(outputs, labels)
    matched = sum(len(queries) for queries, _ in indices)
    weight = matched + criterion.eos_coef * (logits.shape[0] * logits.shape[1] - matched)
    terms = criterion.loss_boxes(outputs, labels, indices, share.boxes)
    mean = criterion.loss_labels(outputs, labels, indices, share.boxes)["loss_ce"]
    return {**terms, "loss_ce": mean * weight / share.weight}
