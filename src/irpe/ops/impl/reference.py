"""The specification: the paper's equations written out, one vector for each pair of tokens.

Every other way to compute the attention is tested against this file. It takes n^2 d time and
memory, in float32 at least.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.ops.call import AttentionCall
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
    for bucket_map, table in zip(call.maps, wide.tables.widened(z.shape[-1]).value, strict=False):
        z = z + torch.einsum("bhij,bhijd->bhid", a, _rows_of_pairs(table, bucket_map))
    return z.to(call.q.dtype)


def attention_weights(call: AttentionCall) -> Scores:
    """Returns the softmax of Eq. 2 over the scores of Eq. 13."""
    e = (call.q @ call.k.mT + position_scores(call)) * call.scale
    return masked_softmax(e, call.mask)


def position_scores(call: AttentionCall) -> Scores:
    """Returns b_ij, what the encoding adds to the scores before they are scaled (Eq. 14-16)."""
    batch, heads, queries, dim = call.q.shape
    tables = call.tables.widened(dim)
    b = call.q.new_zeros(batch, heads, queries, call.k.shape[2])
    for bucket_map, table in zip(call.maps, tables.bias, strict=False):
        b = b + _rows_of_pairs(table, bucket_map)
    for bucket_map, table in zip(call.maps, tables.key, strict=False):
        r = _rows_of_pairs(table, bucket_map)
        b = b + torch.einsum("bhid,bhijd->bhij", call.table_q, r)
    for bucket_map, table in zip(call.maps, tables.query, strict=False):
        r = _rows_of_pairs(table, bucket_map)
        b = b + torch.einsum("bhjd,bhijd->bhij", call.table_k, r)
    return b


def _rows_of_pairs(
    table: Tensor, bucket_map: BucketMap
) -> Float[Tensor, "batch_or_1 heads_or_1 query key *dim"]:
    """Returns r_ij for every pair: the row of the table that the map names."""
    ids = bucket_map.ids.long()
    r = table[:, ids if ids.ndim == 3 else ids.unsqueeze(0)]  # heads_or_1 batch_or_1 query key *dim
    return r.transpose(0, 1)
