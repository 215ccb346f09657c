"""`rpe_attention`: check the arguments, choose an implementation, run it."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

from irpe.core.bucket_map import BucketMap
from irpe.ops.checks import check_call, check_has_tables
from irpe.ops.choose import Explanation, explain_choice, select
from irpe.ops.impl import reference
from irpe.ops.precision import accumulation_dtype, autocasts, without_autocast
from irpe.ops.shapes import Keys, Mask, ScalarTable, Scores, Tokens, VectorTable


class ScoreArguments(TypedDict, total=False):
    """The keywords of `rpe_attention_weights`: what decides the scores."""

    query_tables: Sequence[VectorTable] | None
    key_tables: Sequence[VectorTable] | None
    bias_tables: Sequence[ScalarTable] | None
    attn_mask: Mask | None
    scale: float | None
    table_q: Tokens | None
    table_k: Keys | None


class CallArguments(ScoreArguments, total=False):
    """The keywords of `rpe_attention`, `impl` excepted: what a call consists of."""

    value_tables: Sequence[VectorTable] | None
    dropout_p: float


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
    call = check_call(
        q,
        k,
        v,
        maps,
        query_tables=query_tables,
        key_tables=key_tables,
        value_tables=value_tables,
        bias_tables=bias_tables,
        attn_mask=attn_mask,
        dropout_p=dropout_p,
        scale=scale,
        table_q=table_q,
        table_k=table_k,
    )
    check_has_tables(call)
    implementation = select(call, impl)
    if not autocasts(q):
        return implementation.attention(call)
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
    call = check_call(
        q,
        k,
        k,
        maps,
        query_tables=query_tables,
        key_tables=key_tables,
        bias_tables=bias_tables,
        attn_mask=attn_mask,
        scale=scale,
        table_q=table_q,
        table_k=table_k,
        dtype=accumulation_dtype(q.dtype),
    )
    with without_autocast(q):
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
    call = check_call(
        q,
        k,
        k,
        maps,
        query_tables=query_tables,
        key_tables=key_tables,
        bias_tables=bias_tables,
        dtype=accumulation_dtype(q.dtype),
    )
    with without_autocast(q):
        return reference.position_scores(call).to(q.dtype)


def explain(
    q: Tokens, k: Keys, v: Keys, maps: Sequence[BucketMap], **arguments: Unpack[CallArguments]
) -> Explanation:
    """Returns which implementation `rpe_attention` takes for a call, and why no other.

    Print it; nothing is computed. All arguments are those of `rpe_attention`, `impl` excepted.

    Examples:
        >>> import irpe, torch
        >>> q = torch.randn(1, 2, 196, 32)
        >>> maps = irpe.bucket_maps("product-contextual-k", grid=(14, 14))
        >>> found = irpe.explain(q, q, q, maps, key_tables=[torch.zeros(1, 49, 32)])
        >>> print(found.others["reference"])
        it is the specification: one vector for each pair, n^2 d time and memory
    """
    call = check_call(q, k, v, maps, **arguments)
    check_has_tables(call)
    return explain_choice(call)
