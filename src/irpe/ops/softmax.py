"""Masks as `scaled_dot_product_attention` takes them, and the softmax under them."""

import torch

from irpe.ops.shapes import Mask, Scores


def masked_softmax(scores: Scores, mask: Mask | None) -> Scores:
    """Returns the softmax over the keys that the mask leaves; a query with no key left gets zeros.

    Args:
        scores: The scaled scores.
        mask: True where a key takes part, or scores to add.
    """
    if mask is None:
        return scores.softmax(dim=-1)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    has_no_key = (scores == -torch.inf).all(dim=-1, keepdim=True)
    return scores.masked_fill(has_no_key, 0.0).softmax(dim=-1).masked_fill(has_no_key, 0.0)


def masked_softmax_into(scores: Scores, mask: Mask, out: Scores | None = None) -> Scores:
    """The same for scores that nothing else uses and no gradient passes.

    Args:
        scores: The scaled scores; the mask is applied to them in place.
        mask: True where a key takes part, or scores to add.
        out: Where to write the result, if given; in place it would be slower.
    """
    scores = add_mask_(scores, mask)
    has_no_key = scores.amax(dim=-1, keepdim=True) == -torch.inf
    return torch.softmax(scores, dim=-1, out=out).masked_fill_(has_no_key, 0.0)


def masked_scores(scores: Scores, mask: Mask) -> Scores:
    """Returns scores under a mask, both of which may be broadcast; neither is changed."""
    shape = torch.broadcast_shapes(scores.shape, mask.shape)
    return add_mask_(scores.expand(shape).clone(), mask)


def add_mask_(scores: Scores, mask: Mask) -> Scores:
    """Applies a mask to scores, in place."""
    if mask.dtype == torch.bool:
        return scores.masked_fill_(~mask, -torch.inf)
    return scores.add_(mask)
