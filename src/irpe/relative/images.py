"""Images that a model is measured on: batches, and those held out."""

from collections.abc import Iterable

import torch
from torch import Tensor

from irpe.errors import UserError, UserTypeError


def batches_of(
    images: Tensor | Iterable[Tensor],
    labels: Tensor | None,
    holdout: float,
    seed: int,
    batch_size: int,
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Returns the batches to solve on, those held out, and the labels of the latter."""
    groups = _as_tensors(images)
    if not 0 < holdout < 1:
        raise UserError(f"holdout {holdout} is not between 0 and 1")
    count = sum(map(len, groups))
    if labels is not None and len(labels) != count:
        raise UserError(f"labels: {len(labels)} for {count} images; give one for each")
    generator = torch.Generator().manual_seed(seed)
    solving, held_out, held_labels = list[Tensor](), list[Tensor](), list[Tensor]()
    of_groups = [None] * len(groups) if labels is None else labels.split([*map(len, groups)])
    for images, own in zip(groups, of_groups, strict=True):
        order = torch.randperm(len(images), generator=generator)
        first = min(max(round(len(images) * holdout), 1), len(images) - 1)
        held_out += images[order[:first]].split(batch_size)
        solving += images[order[first:]].split(batch_size)
        if own is not None:
            held_labels.append(own[order[:first]])
    return solving, held_out, torch.cat(held_labels) if held_labels else None


def _as_tensors(images: Tensor | Iterable[Tensor]) -> list[Tensor]:
    groups = [images] if isinstance(images, Tensor) else list(images)
    for each in groups:
        if not isinstance(each, Tensor):
            raise UserTypeError(
                f"images: {type(each).__name__} is not a tensor of images as the model takes them"
            )
    small = [len(each) for each in groups if len(each) < 2]
    if not groups or small:
        raise UserError(
            f"images: {small[0] if small else 0} of one size; at least 2 are needed, one to solve "
            "on and one to choose the penalty on; some dozens are better"
        )
    return groups
