"""Masks as `scaled_dot_product_attention` takes them, and the softmax under them."""

import torch

from irpe.ops.shapes import Mask, Pairs


def masked_softmax(scores: Pairs, attn_mask: Mask | None) -> Pairs:
    """Returns the softmax over the keys that the mask leaves; a row with no key left is zero.

    Args:
        scores: The scaled scores.
        attn_mask: True where a key takes part, or numbers to add to the scores.
    """
    if attn_mask is None:
        return scores.softmax(dim=-1)
    if attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, float("-inf"))
    else:
        scores = scores + attn_mask
    has_no_key = (scores == float("-inf")).all(dim=-1, keepdim=True)
    return scores.masked_fill(has_no_key, 0.0).softmax(dim=-1).masked_fill(has_no_key, 0.0)
