"""The terms of a role: one for each table, or one for all of them, and what is done with all."""

from collections.abc import Sequence

import torch

from irpe.ops.call import head_slices
from irpe.ops.gather import Owner
from irpe.ops.impl.blockwise.terms import (
    BucketTerm,
    KeyBucketTerm,
    PairTerm,
    QueryAxisTerm,
    Term,
)
from irpe.ops.key_patterns import ByAxis, join_axes, key_pattern, query_axis
from irpe.ops.shapes import Ids, Tokens, VectorTable
from irpe.ops.table_products import Sums


def make_terms(
    x: Tokens,
    tables: Sequence[VectorTable],
    ids: Sequence[Ids],
    grid: Sequence[int],
    scale: float,
    owner: Owner = "query",
) -> list[Term]:
    """Returns the terms of a role, each of the kind that takes fewer operations.

    There is a term for each table, or one for all of them, joined, if each depends on one axis of
    the grid and all have the same heads and the whole head dimension.

    Args:
        x: The tokens.
        tables: The tables, restricted to the rows in use.
        ids: For each table, the row of each pair.
        grid: The grid of the keys; empty if they do not lie on one.
        scale: A factor of all products.
        owner: Which token of a pair is x.
    """
    if owner == "query":
        joined = _join_axes(x, tables, ids, grid, scale)
        if joined is not None:
            return [joined]
    return [
        _make_term(x[..., dims], table, of_pairs, grid, scale, owner)
        for dims, table, of_pairs in zip(
            head_slices(tables, x.shape[-1]), tables, ids, strict=False
        )
    ]


def _make_term(
    x: Tokens, table: VectorTable, ids: Ids, grid: Sequence[int], scale: float, owner: Owner
) -> Term:
    if uses_pairs(table, ids):
        return PairTerm(x, table, ids, scale, owner)
    if owner == "query":
        return BucketTerm(x, table, key_pattern(ids, grid), scale)
    pattern = query_axis(ids, grid)
    if pattern is not None:
        return QueryAxisTerm(x, table, pattern, scale)
    return KeyBucketTerm(x, table, ids, scale)


def _join_axes(
    x: Tokens,
    tables: Sequence[VectorTable],
    ids: Sequence[Ids],
    grid: Sequence[int],
    scale: float,
) -> BucketTerm | None:
    shapes = {(table.shape[0], table.shape[2]) for table in tables}
    if len(tables) < 2 or len(shapes) > 1 or tables[0].shape[2] < x.shape[-1]:
        return None
    patterns = [key_pattern(of_pairs, grid) for of_pairs in ids]
    by_axis = [pattern for pattern in patterns if isinstance(pattern, ByAxis)]
    if len(by_axis) < len(tables) or any(map(uses_pairs, tables, ids)):
        return None
    pattern = join_axes(by_axis, [table.shape[1] for table in tables])
    return BucketTerm(x, torch.cat(list(tables), dim=1), pattern, scale)


def uses_pairs(table: VectorTable, ids: Ids) -> bool:
    """Tells whether multiplying the row of each pair takes fewer operations."""
    return table.shape[1] > ids.shape[1]


def keeps_sums(tables: Sequence[VectorTable], ids: Sequence[Ids]) -> bool:
    """Tells whether the sums of a role's terms can be kept between passes: none is of pairs."""
    return bool(tables) and not any(map(uses_pairs, tables, ids))


def join_sums(terms: Sequence[Term]) -> Sums:
    """Returns the sums of all terms, side by side."""
    sums = [term.sums for term in terms if isinstance(term, BucketTerm) and term.sums is not None]
    return sums[0] if len(sums) == 1 else torch.cat(sums, dim=-1)


def restore_sums(terms: Sequence[Term], joined: Sums) -> None:
    """Gives the terms the sums that another pass collected."""
    for term, sums in zip(terms, joined.split([t.table.shape[1] for t in terms], -1), strict=True):
        assert isinstance(term, BucketTerm)
        term.sums = sums


def release_products(terms: Sequence[Term]) -> None:
    """Frees what was made for the products, once all blocks are done: the sums are as large."""
    for term in terms:
        for name in ("z", "narrow"):
            vars(term).pop(name, None)


def add_combinations(out: Tokens, terms: Sequence[Term], tables: Sequence[VectorTable]) -> None:
    """Adds the combination of each term to the dimensions that its table has."""
    for term, dims in zip(terms, head_slices(tables, out.shape[-1]), strict=False):
        out[..., dims] += term.combination()


def table_gradients(terms: Sequence[Term], tables: Sequence[VectorTable]) -> list[VectorTable]:
    """Returns the gradient of each table; one term may have joined them."""
    if len(terms) == len(tables):
        return [term.gradient() for term in terms]
    parts = terms[0].gradient().split([table.shape[1] for table in tables], dim=1)
    return [part.clone() for part in parts]  # what an operator returns shares no memory
