"""Where tokens are, as modules take it: a grid is the short form of `irpe.Positions`."""

from collections.abc import Sequence

import torch

from irpe.core.augmentation import AugmentedGrid, Sample
from irpe.core.grid import Grid
from irpe.core.positions import Positions
from irpe.ops.shapes import Mask

Where = Grid | Sequence[int] | Positions | AugmentedGrid


def split_augmented(where: Where) -> tuple[Grid | Sequence[int] | Positions, Sample | None]:
    """Returns where tokens are, and the random numbers of the forward pass, if there are some."""
    if isinstance(where, AugmentedGrid):
        return where.where, where.sample
    return where, None


def mask_padding(attn_mask: Mask | None, where: Where) -> Mask | None:
    """Returns a mask of attention that leaves out padding too, if there is some.

    Args:
        attn_mask: True where a key takes part, or scores to add; `None` for all keys.
        where: Where the tokens are.
    """
    where, _ = split_augmented(where)
    if not isinstance(where, Positions) or where.constant is not None:
        return attn_mask
    padding = where.padding_mask()
    if padding is None:
        return attn_mask
    if attn_mask is None:
        return padding
    if attn_mask.dtype == torch.bool:
        return attn_mask & padding
    return torch.where(padding, attn_mask, float("-inf"))
