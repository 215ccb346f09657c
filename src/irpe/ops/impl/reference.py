"""The specification: the paper's equations written out, one vector for each pair of tokens.

Every other way to compute the attention is tested against this file. It takes n^2 d time and
memory, in float32 at least.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from irpe.core.bucket_map import BucketMap
from irpe.ops.call import AttentionCall, head_slices
from irpe.ops.precision import accumulation_dtype
from irpe.ops.shapes import Scores, Tokens
from irpe.ops.softmax import masked_softmax


def supports(call: AttentionCall) -> str | None:
    """Returns why the call cannot be computed here: never."""


def attention(call: AttentionCall) -> Tokens:
    """Returns Eq. 5 and 17: the weighted sum of the values and of their encodings."""
    wide = call.to(accumulation_dtype(call.q.dtype))
    a = F.dropout(attention_weights(wide), call.dropout_p)
    z = a @ wide.v
    for r in _vectors_of_pairs(wide, wide.value_tables):
        z = z + torch.einsum("bhij,bhijd->bhid", a, r)
    return z.to(call.q.dtype)


def attention_weights(call: AttentionCall) -> Scores:
    """Returns the softmax of Eq. 2 over the scores of Eq. 13."""
    e = (call.q @ call.k.mT + position_scores(call)) * call.scale
    return masked_softmax(e, call.mask)


def position_scores(call: AttentionCall) -> Scores:
    """Returns b_ij, what the encoding adds to the scores before they are scaled (Eq. 14-16)."""
    batch, heads, queries, _ = call.q.shape
    b = call.q.new_zeros(batch, heads, queries, call.k.shape[2])
    for table, bucket_map in zip(call.bias_tables, call.maps, strict=bool(call.bias_tables)):
        b = b + _rows_of_pairs(table, bucket_map)
    x = call.q if call.table_q is None else call.table_q
    for r in _vectors_of_pairs(call, call.key_tables):
        b = b + torch.einsum("bhid,bhijd->bhij", x, r)
    x = call.k if call.table_k is None else call.table_k
    for r in _vectors_of_pairs(call, call.query_tables):
        b = b + torch.einsum("bhjd,bhijd->bhij", x, r)
    return b


def _vectors_of_pairs(
    call: AttentionCall, tables: tuple[Tensor, ...]
) -> list[Float[Tensor, "batch_or_1 heads_or_1 query key dim"]]:
    """Returns r_ij for every table, with zeros where it has no dimensions of a head (Eq. 12)."""
    if not tables:
        return []
    dim = call.q.shape[-1]
    found: list[Tensor] = []
    for table, dims, bucket_map in zip(tables, head_slices(tables, dim), call.maps, strict=True):
        before = dims.start or 0
        wide = F.pad(table, (before, dim - before - table.shape[-1]))
        found.append(_rows_of_pairs(wide, bucket_map))
    return found


def _rows_of_pairs(
    table: Tensor, bucket_map: BucketMap
) -> Float[Tensor, "batch_or_1 heads_or_1 query key *dim"]:
    """Returns r_ij for every pair: the row of the table that the map names."""
    ids = bucket_map.compact_ids.long()
    r = table[:, ids if ids.ndim == 3 else ids.unsqueeze(0)]  # heads_or_1 batch_or_1 query key *dim
    return r.transpose(0, 1)
