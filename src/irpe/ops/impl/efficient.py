"""The efficient form of Eq. 27-28, for values too, in plain operations.

This is the form that exporters see: its gradients are PyTorch's own. It takes n k d + n^2
operations and keeps several numbers per head and pair, in float32 at least.
"""

import torch.nn.functional as F  # noqa: N812

from irpe.core.buckets import BucketMap
from irpe.ops.lookup import accumulation_dtype, bucket_sum_plain, lookup_plain
from irpe.ops.masking import masked_softmax
from irpe.ops.shapes import Mask, Tokens
from irpe.ops.tables import Tables, shares


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
        e = e + lookup_plain(table.unsqueeze(1), ids, "nobody")
    dim = q.shape[-1]
    for table, ids, share in zip(used.key, all_ids, shares(used.key, dim), strict=False):
        e = e + lookup_plain(q[..., share] @ table.mT, ids, "query")  # Eq. 27-28
    for table, ids, share in zip(used.query, all_ids, shares(used.query, dim), strict=False):
        e = e + lookup_plain(k[..., share] @ table.mT, ids, "key")
    a = F.dropout(masked_softmax(e * scale, attn_mask), dropout_p)
    z = a @ v
    for table, ids in zip(used.widened(dim).value, all_ids, strict=False):
        z = z + bucket_sum_plain(a, ids, table.shape[1], "query") @ table
    return z.to(dtype)
