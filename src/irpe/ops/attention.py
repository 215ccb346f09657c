"""`rpe_attention`: checks its arguments, then hands them to one of the implementations."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.ops.checks import check_arguments
from irpe.ops.impl import efficient, folded, fused, reference
from irpe.ops.precision import compute_dtype, without_autocast
from irpe.ops.shapes import Mask, Pairs, ScalarTable, Tokens, VectorTable
from irpe.ops.tables import Tables

IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "reference": reference.attention,
    "efficient": efficient.attention,
    "fused": fused.attention,
    "folded": folded.attention,
}


def rpe_attention(
    q: Tokens,
    k: Tokens,
    v: Tokens,
    maps: Sequence[BucketMap],
    *,
    query_tables: Sequence[VectorTable] | None = None,
    key_tables: Sequence[VectorTable] | None = None,
    value_tables: Sequence[VectorTable] | None = None,
    bias_tables: Sequence[ScalarTable] | None = None,
    attn_mask: Mask | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    impl: str = "auto",
) -> Tokens:
    """Returns attention with relative position encodings, Eq. 5 and 13-17.

    The tables of a role are as wide as a head and what they give is added up, or they are narrower
    and lie side by side in it, so that their widths add up to its dimension (Eq. 12).

    Args:
        q: Queries, as they enter the dot product.
        k: Keys, as they enter the dot product.
        v: Values.
        maps: The bucket maps of the encoding on the grid at hand.
        query_tables: r^Q, one table per map, multiplied with the keys.
        key_tables: r^K, one table per map, multiplied with the queries.
        value_tables: r^V, one table per map, added to the values.
        bias_tables: Scalars, one table per map, added to the scores before they are scaled.
        attn_mask: True where a key takes part, or numbers to add to the scaled scores; it may be
            broadcast to (batch, heads, tokens, tokens).
        dropout_p: The probability with which an attention weight is dropped.
        scale: What the scores are multiplied with; 1 / sqrt(dim) if not given.
        impl: "auto" (see `automatic_impl`), or the name of one of `IMPLEMENTATIONS`, which is then
            used or refused, never replaced.
    """
    maps, tables = tuple(maps), _tables(query_tables, key_tables, value_tables, bias_tables)
    check_arguments(q, k, v, maps, tables, attn_mask, dropout_p)
    if not any(tables.roles()):
        raise ValueError(
            "no tables: pass query_tables, key_tables, value_tables or bias_tables; attention "
            "without an encoding is torch.nn.functional.scaled_dot_product_attention"
        )
    if impl != "auto" and impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl {impl!r} is not one of auto, {', '.join(IMPLEMENTATIONS)}")
    dtype = compute_dtype(q)
    mask = _four_dimensional(attn_mask, dtype)
    q, k, v, tables = q.to(dtype), k.to(dtype), v.to(dtype), tables.to(dtype)
    attention = IMPLEMENTATIONS[automatic_impl() if impl == "auto" else impl]
    with without_autocast(q):
        return attention(q, k, v, maps, tables, mask, dropout_p, _scale(scale, q))


def rpe_attention_weights(
    q: Tokens,
    k: Tokens,
    maps: Sequence[BucketMap],
    *,
    query_tables: Sequence[VectorTable] | None = None,
    key_tables: Sequence[VectorTable] | None = None,
    bias_tables: Sequence[ScalarTable] | None = None,
    attn_mask: Mask | None = None,
    scale: float | None = None,
) -> Pairs:
    """Returns the attention weights a_ij of Eq. 2; arguments as in `rpe_attention`."""
    maps, tables = tuple(maps), _tables(query_tables, key_tables, None, bias_tables)
    check_arguments(q, k, k, maps, tables, attn_mask, 0.0)
    mask = _four_dimensional(attn_mask, q.dtype)
    return reference.attention_weights(q, k, maps, tables.to(q.dtype), mask, _scale(scale, q))


def rpe_scores(
    q: Tokens,
    k: Tokens,
    maps: Sequence[BucketMap],
    *,
    query_tables: Sequence[VectorTable] | None = None,
    key_tables: Sequence[VectorTable] | None = None,
    bias_tables: Sequence[ScalarTable] | None = None,
) -> Pairs:
    """Returns b_ij of Eq. 13, what the encoding adds to the scores before they are scaled."""
    maps, tables = tuple(maps), _tables(query_tables, key_tables, None, bias_tables)
    check_arguments(q, k, k, maps, tables, None, 0.0)
    return reference.position_scores(q, k, maps, tables.to(q.dtype))


def automatic_impl() -> str:
    """Returns the implementation that "auto" stands for: exporters get operations they know."""
    return "efficient" if torch.compiler.is_exporting() else "fused"


def _tables(*roles: Sequence[Tensor] | None) -> Tables:
    return Tables(*(tuple(role or ()) for role in roles))


def _scale(scale: float | None, q: Tensor) -> float:
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _four_dimensional(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.ndim)]
    return mask if mask.dtype == torch.bool else mask.to(dtype)
