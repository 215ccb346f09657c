"""The efficient form of Eq. 27-28, for values too, in plain operations.

This is the form that exporters see: its gradients are PyTorch's own. It takes n k d + n^2
operations and keeps several numbers per head and pair, in float32 at least.
"""

import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.ops.lookup import (
    accumulation_dtype,
    bucket_sum_plain,
    lookup_plain,
    place_by_key,
    place_by_query,
)
from irpe.ops.masking import masked_softmax
from irpe.ops.shapes import Ids, Mask, Pairs, Tokens, VectorTable
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
    """Returns what the reference returns."""
    dtype, wide = q.dtype, accumulation_dtype(q.dtype)
    q, k, v, used = q.to(wide), k.to(wide), v.to(wide), tables.used(maps).to(wide)
    all_ids = [bucket_map.compact_ids for bucket_map in maps]
    e = q @ k.mT
    for table, ids in zip(used.bias, all_ids, strict=False):
        e = e + lookup_plain(table, ids)
    for table, ids in zip(used.key, all_ids, strict=False):
        e = e + lookup_plain(_by_bucket(q, table), place_by_query(ids, table.shape[1]))
    for table, ids in zip(used.query, all_ids, strict=False):
        e = e + lookup_plain(_by_bucket(k, table), place_by_key(ids, table.shape[1]))
    a = F.dropout(masked_softmax(e * scale, attn_mask), dropout_p)
    z = a @ v
    for table, ids in zip(used.value, all_ids, strict=False):
        z = z + _sum_by_bucket(a, table, ids) @ table
    return z.to(dtype)


def _by_bucket(x: Tokens, table: VectorTable) -> Float[Tensor, "batch heads places"]:
    """Returns z of Eq. 27, the product of each token with each row, flattened."""
    return (x @ table.mT).flatten(-2)


def _sum_by_bucket(
    a: Pairs, table: VectorTable, ids: Ids
) -> Float[Tensor, "batch heads query rows"]:
    """Returns the attention that each query pays to each bucket."""
    rows = table.shape[1]
    sums = bucket_sum_plain(a, place_by_query(ids, rows), ids.shape[0] * rows)
    return sums.unflatten(-1, (ids.shape[0], rows))
