"""The specification: the paper's equations written out, one vector for each pair of tokens.

Every other way to compute the attention is tested against this file. It takes n^2 d time and
memory.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.ops.masking import masked_softmax
from irpe.ops.shapes import Mask, Pairs, Tokens
from irpe.ops.tables import Tables


def attention(
    q: Tokens,
    k: Tokens,
    v: Tokens,
    maps: tuple[BucketMap, ...],
    tables: Tables,
    attn_mask: Mask | None,
    dropout_p: float,
    scale: float,
) -> Tokens:
    """Returns Eq. 5 and 17: the weighted sum of the values and of their encodings."""
    a = F.dropout(attention_weights(q, k, maps, tables, attn_mask, scale), dropout_p)
    z = a @ v
    for bucket_map, table in zip(maps, tables.widened(v.shape[-1]).value, strict=False):
        r = _rows_of_pairs(table, bucket_map, heads=q.shape[1])  # heads, query, key, dim
        z = z + torch.einsum("bhij,hijd->bhid", a, r)
    return z


def attention_weights(
    q: Tokens,
    k: Tokens,
    maps: tuple[BucketMap, ...],
    tables: Tables,
    attn_mask: Mask | None,
    scale: float,
) -> Pairs:
    """Returns the softmax of Eq. 2 over the scores of Eq. 13."""
    e = (q @ k.transpose(-2, -1) + position_scores(q, k, maps, tables)) * scale
    return masked_softmax(e, attn_mask)


def position_scores(q: Tokens, k: Tokens, maps: tuple[BucketMap, ...], tables: Tables) -> Pairs:
    """Returns b_ij, what the encoding adds to the scores before they are scaled (Eq. 14-16)."""
    batch, heads, tokens, _ = q.shape
    tables = tables.widened(q.shape[-1])
    b = q.new_zeros(batch, heads, tokens, tokens)
    for bucket_map, table in zip(maps, tables.bias, strict=False):
        b = b + _rows_of_pairs(table, bucket_map, heads)
    for bucket_map, table in zip(maps, tables.key, strict=False):
        r = _rows_of_pairs(table, bucket_map, heads)
        b = b + torch.einsum("bhid,hijd->bhij", q, r)
    for bucket_map, table in zip(maps, tables.query, strict=False):
        r = _rows_of_pairs(table, bucket_map, heads)
        b = b + torch.einsum("bhjd,hijd->bhij", k, r)
    return b


def _rows_of_pairs(table: Tensor, bucket_map: BucketMap, heads: int) -> Tensor:
    """Returns r_ij for every head and pair: the row of the table that the map names."""
    r = table[:, bucket_map.ids.long()]
    return r.expand(heads, *r.shape[1:])
