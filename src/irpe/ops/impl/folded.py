"""Maps that depend on one axis alone, as extra head dimensions of an unmodified attention.

The row of pair (i, j) then depends on token i and on the coordinate of token j, of which there are
few: b_ij is an inner product of what token i scores for each coordinate with the one-hot coordinate
of token j. Nothing of size n x n is formed here, forward or backward.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Integer
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.ops.call import AttentionCall, head_slices
from irpe.ops.gather import bucket_sum, gather
from irpe.ops.key_patterns import ByAxis, key_pattern, query_axis
from irpe.ops.precision import accumulation_dtype
from irpe.ops.shapes import Tokens, VectorTable


def supports(call: AttentionCall) -> str | None:
    """Returns why the call cannot be computed here, or `None` if it can."""
    if call.is_rotated:
        return "it does not take table_q and table_k"
    if call.q.shape[2] != call.k.shape[2]:
        return "it takes as many queries as keys"
    for m in call.maps:
        of_keys, of_queries = key_pattern(m.compact_ids, m.grid), query_axis(m.compact_ids, m.grid)
        if not isinstance(of_keys, ByAxis) or of_queries is None:
            return "it takes maps that depend on one of several axes each: method 'cross'"
    return None


class _Coordinates(NamedTuple):
    """A map that depends on one axis.

    Args:
        by_key: For each query, the bucket of each coordinate of a key.
        by_query: For each key, the bucket of each coordinate of a query.
        one_hot: The coordinate of each token.
    """

    by_key: Integer[Tensor, "tokens coordinates"]
    by_query: Integer[Tensor, "tokens coordinates"]
    one_hot: Integer[Tensor, "tokens coordinates"]


def attention(call: AttentionCall) -> Tokens:
    """Returns what the reference returns."""
    wide = call.to(accumulation_dtype(call.q.dtype))
    used, q, k = wide.tables.used(wide.maps), wide.q, wide.k
    coordinates = [_split(bucket_map) for bucket_map in wide.maps]
    q_parts, k_parts, v_parts = [q], [k], [wide.v]
    dim = q.shape[-1]
    for table, dims, each in zip(used.key, head_slices(used.key, dim), coordinates, strict=False):
        q_parts.append(_at_coordinates(q[..., dims], table, each.by_key))
        k_parts.append(each.one_hot)
    query_slices = head_slices(used.query, dim)
    for table, dims, each in zip(used.query, query_slices, coordinates, strict=False):
        q_parts.append(each.one_hot)
        k_parts.append(_at_coordinates(k[..., dims], table, each.by_query))
    for table, each in zip(used.bias, coordinates, strict=False):
        q_parts.append(gather(table.unsqueeze(1), each.by_key, "nobody"))
        k_parts.append(each.one_hot)
    for _, each in zip(used.value, coordinates, strict=False):
        v_parts.append(each.one_hot)

    q, k, v = _laid_side_by_side(q, q_parts, k_parts, v_parts)
    z = F.scaled_dot_product_attention(q, k, v, wide.mask, wide.dropout_p, scale=wide.scale)
    sizes = [part.shape[-1] for part in v_parts]
    z, *sums, _ = z.split([*sizes, z.shape[-1] - sum(sizes)], dim=-1)
    for table, a, each in zip(used.widened(dim).value, sums, coordinates, strict=False):
        z = z + bucket_sum(a, each.by_key, table.shape[1], "query") @ table
    return z.to(call.q.dtype)


def _split(bucket_map: BucketMap) -> _Coordinates:
    of_keys = key_pattern(bucket_map.compact_ids, bucket_map.grid)
    of_queries = query_axis(bucket_map.compact_ids, bucket_map.grid)
    assert isinstance(of_keys, ByAxis)
    assert of_queries is not None
    one_hot = F.one_hot(of_keys.coordinates(), of_keys.ids.shape[1])
    return _Coordinates(of_keys.ids, of_queries.ids, one_hot)


def _at_coordinates(
    x: Tokens, table: VectorTable, ids: Integer[Tensor, "tokens coordinates"]
) -> Float[Tensor, "batch heads tokens coordinates"]:
    """Returns what each token scores for each coordinate: Eq. 27-28 over coordinates."""
    return gather(x @ table.mT, ids, "query")


def _laid_side_by_side(like: Tokens, *sides: list[Tensor]) -> list[Tokens]:
    """Returns queries, keys and values with their extra dimensions, padded to one width."""
    widths = [sum(part.shape[-1] for part in side) for side in sides]
    lead = like.shape[:3]
    return [
        F.pad(
            torch.cat([part.to(like.dtype).expand(*lead, -1) for part in side], dim=-1),
            (0, max(widths) - width),
        )
        for side, width in zip(sides, widths, strict=True)
    ]
