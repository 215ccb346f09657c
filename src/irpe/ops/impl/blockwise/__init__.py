"""The efficient form in blocks of pairs, sized for the device.

For a large image nothing of size (heads, n, n) exists: the weights live block by block and are
computed again in the backward pass. Where they are small, they are kept instead. Buckets that
repeat over the grid are gathered once (`irpe.ops.key_patterns`).
"""

from irpe.ops.call import AttentionCall
from irpe.ops.differentiable import differentiable_attention
from irpe.ops.impl.blockwise.operator import OperatorPasses
from irpe.ops.impl.blockwise.schedule import keeps_weights
from irpe.ops.shapes import Tokens


def supports(call: AttentionCall) -> str | None:
    """Returns why the call cannot be computed here, or `None` if it can."""
    if any(bucket_map.compact_ids.ndim == 3 for bucket_map in call.maps):
        return "it takes maps that are the same for all images of a batch"
    return None


def attention(call: AttentionCall) -> Tokens:
    """Returns what the reference returns."""
    return differentiable_attention(call, OperatorPasses, keeps_weights(call))
