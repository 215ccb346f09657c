"""Maps that depend on one axis alone, as extra head dimensions of an unmodified attention.

The row of pair (i, j) then depends on token i and on the coordinate of token j, of which there are
few: b_ij is an inner product of what token i has to say to each coordinate with the one-hot
coordinate of token j. Nothing of size n x n is formed here, forward or backward.
"""

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Int
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.ops.lookup import bucket_sum_plain, lookup_plain
from irpe.ops.shapes import Mask, Tokens, VectorTable
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
    used = tables.used(maps)
    parts = [_split(bucket_map) for bucket_map in maps]
    q_parts, k_parts, v_parts = [q], [k], [v]
    dim = q.shape[-1]
    key_shares, query_shares = shares(used.key, dim), shares(used.query, dim)
    for table, share, part in zip(used.key, key_shares, parts, strict=False):
        by_key_group, _, one_hot = part
        q_parts.append(_at_groups(q[..., share], table, by_key_group))
        k_parts.append(one_hot)
    for table, share, part in zip(used.query, query_shares, parts, strict=False):
        _, by_query_group, one_hot = part
        q_parts.append(one_hot)
        k_parts.append(_at_groups(k[..., share], table, by_query_group))
    for table, (by_key_group, _, one_hot) in zip(used.bias, parts, strict=False):
        q_parts.append(lookup_plain(table.unsqueeze(1), by_key_group, "nobody"))
        k_parts.append(one_hot)
    for _, (_, _, one_hot) in zip(used.value, parts, strict=False):
        v_parts.append(one_hot)

    q, k, v = _laid_side_by_side(q, q_parts, k_parts, v_parts)
    z = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, scale=scale)
    z, *by_group, _ = z.split([*(p.shape[-1] for p in v_parts), z.shape[-1] - _width(v_parts)], -1)
    for table, a, (ids, _, _) in zip(used.widened(dim).value, by_group, parts, strict=False):
        z = z + bucket_sum_plain(a, ids, table.shape[1], "query") @ table
    return z


def _split(bucket_map: BucketMap) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the ids of (query, group of the key), (key, group of the query), and the groups."""
    groups, representatives = bucket_map.groups, bucket_map.representatives
    if groups is None or representatives is None:
        raise ValueError(
            "impl 'folded' takes maps that depend on one axis each: use method 'cross', or impl "
            "'fused' for this one"
        )
    ids = bucket_map.compact_ids
    return ids[:, representatives], ids[representatives].mT, F.one_hot(groups, len(representatives))


def _at_groups(
    x: Tokens, table: VectorTable, ids: Int[Tensor, "tokens groups"]
) -> Float[Tensor, "batch heads tokens groups"]:
    """Returns what each token has to say to each coordinate: Eq. 27-28 over coordinates."""
    return lookup_plain(x @ table.mT, ids, "query")


def _laid_side_by_side(like: Tokens, *sides: list[Tensor]) -> list[Tokens]:
    """Returns queries, keys and values with their extra dimensions, padded to one width."""
    width = max(map(_width, sides))
    lead = like.shape[:3]
    return [
        F.pad(
            torch.cat([part.to(like.dtype).expand(*lead, -1) for part in side], dim=-1),
            (0, width - _width(side)),
        )
        for side in sides
    ]


def _width(parts: list[Tensor]) -> int:
    return sum(part.shape[-1] for part in parts)
