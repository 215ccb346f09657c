"""The efficient form of Eq. 27-28, for values too, in plain differentiable operators.

Its gradients are PyTorch's own, so it is what exporters, function transforms and forward-mode
differentiation get. It takes n k d + n^2 operations and keeps several elements per head and pair,
in float32 at least.
"""

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from irpe.ops.call import AttentionCall, head_slices
from irpe.ops.gather import Owner, bucket_sum, gather, gather_bias
from irpe.ops.precision import accumulation_dtype
from irpe.ops.shapes import Tokens
from irpe.ops.softmax import masked_softmax


def supports(call: AttentionCall) -> str | None:
    """Returns why the call cannot be computed here: never."""


def attention(call: AttentionCall) -> Tokens:
    """Returns what the reference returns."""
    wide = call.to(accumulation_dtype(call.q.dtype))
    dim, all_ids = wide.q.shape[-1], [m.compact_ids for m in wide.maps]
    all_ids = [ids if ids.ndim == 2 else ids.unsqueeze(1) for ids in all_ids]  # for all heads
    e = wide.q @ wide.k.mT
    if wide.bias_tables:
        for table, ids in zip(wide.bias_tables, all_ids, strict=True):
            e = e + gather_bias(table, ids)
    owners: tuple[tuple[tuple[Tensor, ...], Tensor, Owner], ...] = (
        (wide.key_tables, wide.q if wide.table_q is None else wide.table_q, "query"),
        (wide.query_tables, wide.k if wide.table_k is None else wide.table_k, "key"),
    )
    for tables, x, owner in owners:
        slices = head_slices(tables, dim)
        for table, dims, ids in zip(tables, slices, all_ids[: len(tables)], strict=True):
            e = e + gather(x[..., dims] @ table.mT, ids, owner)  # Eq. 27-28
    a = F.dropout(masked_softmax(e * wide.scale, wide.mask), wide.dropout_p)
    z = a @ wide.v
    if wide.value_tables:
        slices = head_slices(wide.value_tables, dim)
        for table, dims, ids in zip(wide.value_tables, slices, all_ids, strict=True):
            before = dims.start or 0
            wide_table = F.pad(table, (before, dim - before - table.shape[-1]))
            z = z + bucket_sum(a, ids, table.shape[1], "query") @ wide_table
    return z.to(call.q.dtype)
