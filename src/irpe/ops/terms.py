"""The sums in which a table of vectors meets the tokens.

With r_ij the row of the table that pair (i, j) uses, x_i a token and a_ij a number per pair:

- products     y_ij = x_i . r_ij                                   (Eq. 15, 16 and 26)
- combination  x_i  = sum_j a_ij r_ij                              (Eq. 17)
- gradient     dr_t = sum of a_ij x_i over the pairs with I(i, j) = t

The products' gradient in x is a combination and the combination's gradient in a are products, so
these three carry keys, queries and values, forward and backward. For queries the token of a pair
is the key: `by_key`.

`BucketTerm` multiplies the rows that are used and looks the rest up, n k d + n^2 operations
(Eq. 27-28), fewer where the buckets repeat over the grid (`layouts`). `PairTerm` multiplies the row
of each pair, n^2 d operations, which is less where more rows are used than there are keys. Both
work on any block of pairs and collect sums over blocks.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from irpe.ops.layouts import Axes, Layout, Narrow, Pairwise, Rows
from irpe.ops.lookup import bucket_sum, lookup
from irpe.ops.shapes import Ids, Pairs, Tokens, VectorTable
from irpe.ops.tables import shares


class Block(NamedTuple):
    """Some images, heads and queries, with all keys."""

    batch: slice
    heads: slice
    queries: slice


@dataclass
class BucketTerm:
    """The efficient form: everything is kept per token and bucket."""

    x: Tokens
    table: VectorTable
    layout: Layout
    by_key: bool

    def __post_init__(self) -> None:
        self.sums: Float[Tensor, "batch heads tokens rows"] | None = None

    @cached_property
    def z(self) -> Float[Tensor, "batch heads tokens rows"]:
        """The product of each token with each row, Eq. 27."""
        return self.x @ _matrix(self.table).mT

    def products(self, block: Block) -> Pairs:
        """Returns x . r_ij for the pairs of a block."""
        layout = self.layout.at(block.queries)
        return layout.spread(self._look_up(block, layout))

    def add_products(self, block: Block, pairs: Pairs) -> None:
        """Adds x . r_ij to the pairs of a block, in place."""
        layout = self.layout.at(block.queries)
        layout.add(self._look_up(block, layout), pairs)

    def _look_up(self, block: Block, layout: Layout) -> Narrow:
        z = self.z[_owners(block, self.by_key)]
        return lookup(z, layout.ids, _owner(self.by_key))  # Eq. 28

    def collect(self, block: Block, pairs: Pairs) -> None:
        """Adds the pairs of a block to the sums."""
        layout, rows = self.layout.at(block.queries), self.table.shape[1]
        sums = bucket_sum(layout.collect(pairs), layout.ids, rows, _owner(self.by_key))
        shape = torch.Size((*self.x.shape[:3], rows))
        if self.sums is None and sums.shape == shape:
            self.sums = sums
            return
        if self.sums is None:
            self.sums = self.x.new_zeros(shape)
        self.sums[_owners(block, self.by_key)] += sums

    def combination(self) -> Tokens:
        """Returns the combination of all that was collected."""
        assert self.sums is not None
        return self.sums @ _matrix(self.table)

    def gradient(self) -> VectorTable:
        """Returns the gradient of the table from all that was collected."""
        assert self.sums is not None
        if self.table.shape[0] == 1:
            return (self.sums.flatten(0, 2).mT @ self.x.flatten(0, 2)).unsqueeze(0)
        return torch.einsum("bhnt,bhnd->htd", self.sums, self.x)


@dataclass
class PairTerm:
    """The direct form: the rows of a block's pairs are laid out."""

    x: Tokens
    table: VectorTable
    ids: Ids
    by_key: bool

    def __post_init__(self) -> None:
        self.combined = torch.zeros_like(self.x)
        self.table_sums = torch.zeros_like(self.table)
        self.token = "bhjd" if self.by_key else "bhid"
        self.row = "ijd" if self.table.shape[0] == 1 else "hijd"

    def products(self, block: Block) -> Pairs:
        """Returns x . r_ij for the pairs of a block."""
        x = self.x[_owners(block, self.by_key)]
        return torch.einsum(f"{self.token},{self.row}->bhij", x, self._rows(block))

    def add_products(self, block: Block, pairs: Pairs) -> None:
        """Adds x . r_ij to the pairs of a block, in place."""
        pairs += self.products(block)

    def collect(self, block: Block, pairs: Pairs) -> None:
        """Adds the pairs of a block to the sums."""
        x, combined = (t[_owners(block, self.by_key)] for t in (self.x, self.combined))
        combined += torch.einsum(f"bhij,{self.row}->{self.token}", pairs, self._rows(block))
        of_pairs = torch.einsum(f"bhij,{self.token}->{self.row}", pairs, x)
        of_pairs = of_pairs.reshape(self.table.shape[0], -1, self.table.shape[2])
        self.table_sums.index_add_(1, self.ids[block.queries].flatten().long(), of_pairs)

    def combination(self) -> Tokens:
        """Returns the combination of all that was collected."""
        return self.combined

    def gradient(self) -> VectorTable:
        """Returns the gradient of the table from all that was collected."""
        return self.table_sums

    def _rows(self, block: Block) -> Float[Tensor, "*heads query key dim"]:
        return _matrix(self.table)[..., self.ids[block.queries].long(), :]


Term = BucketTerm | PairTerm


def make_terms(
    x: Tokens,
    tables: Sequence[Tensor],
    ids: Sequence[Ids],
    grid: tuple[int, ...] = (),
    rows: Sequence[Tensor] = (),
    by_key: bool = False,
) -> list[Term]:
    """Returns the terms of a role, each of the kind that takes fewer operations.

    There is a term for each table, or one for all of them, joined, if each has an axis and all meet
    the same dimensions and heads.

    Args:
        x: The tokens.
        tables: The tables.
        ids: For each table, the row of each pair.
        grid: The shape of the grid if the rows repeat over it, else nothing.
        rows: The distinct rows of the grid and their numbers; without them, each table is for one
            axis of the grid.
        by_key: Whether the token of a pair is the key.
    """
    its_share = shares(tables, x.shape[-1])
    if by_key:  # what repeats are the keys of a query
        grid, rows = (), ()
    is_alike = len({table.shape[::2] for table in tables}) == 1 and its_share[0] == slice(None)
    if grid and not rows and is_alike and not any(map(uses_pairs, tables, ids)):
        counts = [table.shape[1] for table in tables]
        layout = Axes.of(dict(enumerate(ids)), counts, grid)
        return [BucketTerm(x, torch.cat(list(tables), dim=1), layout, by_key)]
    return [
        PairTerm(x[..., share], table, of_pairs, by_key)
        if uses_pairs(table, of_pairs)
        else BucketTerm(x[..., share], table, _layout(number, of_pairs, grid, rows), by_key)
        for number, (table, of_pairs, share) in enumerate(zip(tables, ids, its_share, strict=False))
    ]


def _layout(number: int, ids: Ids, grid: tuple[int, ...], rows: Sequence[Tensor]) -> Layout:
    if rows:
        narrow, numbers = rows
        return Rows(narrow, numbers, grid[-1], ids.shape[1] - math.prod(grid))
    return Axes.of({number: ids}, [0], grid) if grid else Pairwise(ids)


def uses_pairs(table: Tensor, ids: Ids) -> bool:
    """Tells whether multiplying the row of each pair takes fewer operations."""
    return table.shape[1] > ids.shape[1]


def _owners(block: Block, by_key: bool) -> tuple[slice, slice, slice]:
    """Returns where the tokens of a block's pairs are."""
    return block.batch, block.heads, slice(None) if by_key else block.queries


def _owner(by_key: bool) -> str:
    return "key" if by_key else "query"


def _matrix(table: VectorTable) -> Float[Tensor, "*heads rows dim"]:
    """Returns a shared table as a matrix: products with it are then one large product."""
    return table[0] if table.shape[0] == 1 else table
