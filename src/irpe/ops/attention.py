"""`rpe_attention`: check the arguments, build the call, choose an implementation, run it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from irpe.core.buckets import BucketMap
from irpe.errors import UserTypeError
from irpe.ops.call import AttentionCall, Tables
from irpe.ops.checks import check_arguments, check_has_tables
from irpe.ops.choose import Explanation, explain_choice, select
from irpe.ops.impl import reference
from irpe.ops.precision import accumulation_dtype, compute_dtype, without_autocast
from irpe.ops.shapes import Keys, Mask, ScalarTable, Scores, Tokens, VectorTable


def rpe_attention(
    q: Tokens,
    k: Keys,
    v: Keys,
    maps: Sequence[BucketMap],
    *,
    query_tables: Sequence[VectorTable] | None = None,
    key_tables: Sequence[VectorTable] | None = None,
    value_tables: Sequence[VectorTable] | None = None,
    bias_tables: Sequence[ScalarTable] | None = None,
    attn_mask: Mask | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    table_q: Tokens | None = None,
    table_k: Keys | None = None,
    impl: str = "auto",
) -> Tokens:
    """Returns attention with relative position encodings, Eq. 5 and 13-17.

    The tables of one role either all have the head dimension and are summed, or split it between
    them (concatenation, Eq. 12).

    Args:
        q: Queries, as they enter the dot product.
        k: Keys, as they enter the dot product.
        v: Values.
        maps: The bucket maps of the encoding on the grid at hand.
        query_tables: r^Q, one table per map, multiplied with the keys.
        key_tables: r^K, one table per map, multiplied with the queries.
        value_tables: r^V, one table per map, added to the values.
        bias_tables: Scalars, one table per map, added to the scores before they are scaled.
        attn_mask: True where a key takes part, or scores to add to the scaled ones; it may be
            broadcast to (batch, heads, queries, keys).
        dropout_p: The probability with which an attention weight is dropped.
        scale: The factor of the scores; 1 / sqrt(dim) if not given.
        table_q: The queries that the key tables meet, where these are not q: q before a rotation.
        table_k: The keys that the query tables meet, where these are not k: k before a rotation.
        impl: "auto", or the name of an implementation, which is then used or refused, never
            replaced; `irpe.explain` tells which one a call takes.

    Examples:
        >>> import irpe, torch
        >>> q, k, v = torch.randn(3, 1, 2, 6, 32)  # batch, heads, tokens, head dimension
        >>> maps = irpe.bucket_maps("product-contextual-k", grid=(2, 3))
        >>> irpe.rpe_attention(q, k, v, maps, key_tables=[torch.zeros(1, 49, 32)]).shape
        torch.Size([1, 2, 6, 32])
    """
    call = _build_call(
        q, k, v, maps, Tables.of(query_tables, key_tables, value_tables, bias_tables),
        attn_mask, dropout_p, scale, table_q, table_k, compute_dtype(q),
    )  # fmt: skip
    check_has_tables(call.tables)
    implementation = select(call, impl)
    with without_autocast(q):
        return implementation.attention(call)


def rpe_attention_weights(
    q: Tokens,
    k: Keys,
    maps: Sequence[BucketMap],
    *,
    query_tables: Sequence[VectorTable] | None = None,
    key_tables: Sequence[VectorTable] | None = None,
    bias_tables: Sequence[ScalarTable] | None = None,
    attn_mask: Mask | None = None,
    scale: float | None = None,
    table_q: Tokens | None = None,
    table_k: Keys | None = None,
) -> Scores:
    """Returns the attention weights a_ij of Eq. 2; arguments as in `rpe_attention`.

    Examples:
        >>> import irpe, torch
        >>> q, k = torch.randn(2, 1, 2, 6, 32)
        >>> maps = irpe.bucket_maps("product-bias-k", grid=(2, 3))
        >>> irpe.rpe_attention_weights(q, k, maps, bias_tables=[torch.zeros(1, 49)]).shape
        torch.Size([1, 2, 6, 6])
    """
    call = _build_call(
        q, k, k, maps, Tables.of(query_tables, key_tables, None, bias_tables),
        attn_mask, 0.0, scale, table_q, table_k, accumulation_dtype(q.dtype),
    )  # fmt: skip
    return reference.attention_weights(call).to(q.dtype)


def rpe_scores(
    q: Tokens,
    k: Keys,
    maps: Sequence[BucketMap],
    *,
    query_tables: Sequence[VectorTable] | None = None,
    key_tables: Sequence[VectorTable] | None = None,
    bias_tables: Sequence[ScalarTable] | None = None,
) -> Scores:
    """Returns b_ij of Eq. 13, what the encoding adds to the scores before they are scaled.

    Examples:
        >>> import irpe, torch
        >>> q, k = torch.randn(2, 1, 2, 6, 32)
        >>> maps = irpe.bucket_maps("product-bias-k", grid=(2, 3))
        >>> irpe.rpe_scores(q, k, maps, bias_tables=[torch.zeros(1, 49)]).abs().max()
        tensor(0.)
    """
    call = _build_call(
        q, k, k, maps, Tables.of(query_tables, key_tables, None, bias_tables),
        None, 0.0, None, None, None, accumulation_dtype(q.dtype),
    )  # fmt: skip
    return reference.position_scores(call).to(q.dtype)


def explain(
    q: Tokens, k: Keys, v: Keys, maps: Sequence[BucketMap], **arguments: Any
) -> Explanation:
    """Returns which implementation `rpe_attention` takes for a call, and why no other.

    Print it; nothing is computed. All arguments are those of `rpe_attention`, `impl` excepted.

    Examples:
        >>> import irpe, torch
        >>> q = torch.randn(1, 2, 196, 32)
        >>> maps = irpe.bucket_maps("product-contextual-k", grid=(14, 14))
        >>> print(irpe.explain(q, q, q, maps, key_tables=[torch.zeros(1, 49, 32)]))
        whole: its pairs are few enough to be computed at once
        ...
    """
    names = ("query_tables", "key_tables", "value_tables", "bias_tables")
    tables = Tables.of(*(arguments.pop(name, None) for name in names))
    mask, dropout_p = arguments.pop("attn_mask", None), arguments.pop("dropout_p", 0.0)
    scale, table_q, table_k = (arguments.pop(n, None) for n in ("scale", "table_q", "table_k"))
    call = _build_call(
        q, k, v, maps, tables, mask, dropout_p, scale, table_q, table_k, compute_dtype(q)
    )
    if arguments:
        raise UserTypeError(
            f"{', '.join(arguments)}: not an argument of a call that can be explained"
        )
    check_has_tables(tables)
    return explain_choice(call)


def _build_call(
    q: Tokens,
    k: Keys,
    v: Keys,
    maps: Sequence[BucketMap],
    tables: Tables,
    mask: Mask | None,
    dropout_p: float,
    scale: float | None,
    table_q: Tokens | None,
    table_k: Keys | None,
    dtype: torch.dtype,
) -> AttentionCall:
    call = AttentionCall(
        q, k, v, tuple(maps), tables, mask, dropout_p,
        q.shape[-1] ** -0.5 if scale is None else scale,
        q if table_q is None else table_q,
        k if table_k is None else table_k,
    )  # fmt: skip
    check_arguments(call)
    if mask is not None:
        mask = mask[(None,) * (4 - mask.ndim)]
    return replace(call, mask=mask, scale=float(call.scale)).to(dtype)
