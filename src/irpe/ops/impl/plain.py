"""The efficient form of Eq. 27-28, for values too, in plain differentiable operators.

Its gradients are PyTorch's own, so it is what exporters, function transforms and forward-mode
differentiation get. It takes n k d + n^2 operations and keeps several elements per head and pair,
in float32 at least.
"""

import torch.nn.functional as F  # noqa: N812

from irpe.ops.call import AttentionCall, head_slices
from irpe.ops.gather import bucket_sum, gather, gather_bias, pair_ids
from irpe.ops.precision import accumulation_dtype
from irpe.ops.shapes import Tokens
from irpe.ops.softmax import masked_softmax


def supports(call: AttentionCall) -> str | None:
    """Returns why the call cannot be computed here: never."""


def attention(call: AttentionCall) -> Tokens:
    """Returns what the reference returns."""
    wide = call.to(accumulation_dtype(call.q.dtype))
    used, dim = wide.tables.used(wide.maps), wide.q.shape[-1]
    all_ids = pair_ids([bucket_map.compact_ids for bucket_map in wide.maps])
    e = wide.q @ wide.k.mT
    for table, ids in zip(used.bias, all_ids, strict=False):
        e = e + gather_bias(table, ids)
    for table, ids, dims in zip(used.key, all_ids, head_slices(used.key, dim), strict=False):
        e = e + gather(wide.table_q[..., dims] @ table.mT, ids, "query")  # Eq. 27-28
    for table, ids, dims in zip(used.query, all_ids, head_slices(used.query, dim), strict=False):
        e = e + gather(wide.table_k[..., dims] @ table.mT, ids, "key")
    a = F.dropout(masked_softmax(e * wide.scale, wide.mask), wide.dropout_p)
    z = a @ wide.v
    for table, ids in zip(used.widened(dim).value, all_ids, strict=False):
        z = z + bucket_sum(a, ids, table.shape[1], "query") @ table
    return z.to(call.q.dtype)
