"""The sums in which a table of vectors meets the tokens.

With r_ij the table row of pair (i, j), x_i a token and a_ij a score or weight of the pair:

- products     y_ij = x_i . r_ij                                   (Eq. 15, 16 and 26)
- combination  x_i  = sum_j a_ij r_ij                              (Eq. 17)
- gradient     dr_t = sum of a_ij x_i over the pairs with I(i, j) = t

The products' gradient in x is a combination and the combination's gradient in a are products, so
these three carry keys, queries and values, forward and backward. The owner says which token of a
pair is x: the query, or for query tables the key.

`BucketTerm` multiplies each token with the rows in use and gathers the rest, n k d + n^2 operations
(Eq. 27-28), fewer where the keys' buckets repeat. `KeyBucketTerm` is the same for query tables,
`QueryAxisTerm` for query tables whose buckets depend on one coordinate of the query. `PairTerm`
multiplies the row of each pair, n^2 d operations, which is less where more rows are used than there
are keys. All work on any block of pairs and collect sums over blocks, in float32 at least.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from irpe.ops.gather import Owner, add_bucket_sum_, bucket_sum, gather
from irpe.ops.key_patterns import ByAxis, Dense, Pattern
from irpe.ops.precision import accumulation_dtype, cast, product
from irpe.ops.shapes import Ids, Scores, Tokens, VectorTable
from irpe.ops.table_products import Sums, table_gradient, table_matrix


class Block(NamedTuple):
    """Some images, heads and queries, with all keys."""

    batch: slice
    heads: slice
    queries: slice


@dataclass(eq=False)
class BucketTerm:
    """The efficient form: everything is held per token and table row."""

    x: Tokens
    table: VectorTable
    pattern: Pattern
    scale: float

    def __post_init__(self) -> None:
        self.sums: Sums | None = None
        self._last: tuple[slice, Pattern] | None = None

    @cached_property
    def z(self) -> Sums:
        """The scaled product of each token with each row, Eq. 27."""
        return product(self.x, table_matrix(self.table).mT, self.scale)

    def write_products(self, block: Block, out: Scores) -> None:
        """Writes x . r_ij for the pairs of a block."""
        pattern = self._pattern(block.queries)
        if isinstance(pattern, Dense):
            gather(self.z[block], pattern.ids, "query", out)  # Eq. 28
        else:
            pattern.expand(gather(self.z[block], pattern.ids, "query"), out)

    def add_products(self, block: Block, scores: Scores) -> None:
        """Adds x . r_ij to the scores of a block, in place."""
        pattern = self._pattern(block.queries)
        pattern.add(gather(self.z[block], pattern.ids, "query"), scores)

    def collect(self, block: Block, scores: Scores) -> None:
        """Adds the pairs of a block to the sums, which take the memory of its products.

        A block's products are not needed once it is collected, and are as large.
        """
        if self.sums is None:
            shape = (*self.x.shape[:3], self.table.shape[1])
            self.sums = self.z if "z" in vars(self) else scores.new_empty(shape)
        pattern, sums = self._pattern(block.queries), self.sums[block].zero_()
        add_bucket_sum_(sums, pattern.collect(scores), pattern.ids, "query")

    def combination(self) -> Tokens:
        """Returns the combination of all that was collected."""
        assert self.sums is not None
        return product(self.sums.to(self.table.dtype), table_matrix(self.table), self.scale)

    def gradient(self) -> VectorTable:
        """Returns the gradient of the table from all that was collected."""
        assert self.sums is not None
        return table_gradient(self.sums, self.x, self.table, self.scale)

    def _pattern(self, queries: slice) -> Pattern:
        """Returns the pattern of some queries; blocks of the same queries follow each other."""
        if self._last is None or self._last[0] != queries:
            pattern = self.pattern.at(queries)
            self._last = queries, pattern._replace(ids=pattern.ids.long())
        return self._last[1]


@dataclass(eq=False)
class KeyBucketTerm:
    """The efficient form for query tables, whose token is the key.

    The buckets of all keys are one set, so that the index of a pair's bucket is the same for all
    images and heads.
    """

    x: Tokens
    table: VectorTable
    ids: Ids
    scale: float

    def __post_init__(self) -> None:
        self.sums: Float[Tensor, "batch heads 1 keys*rows"] | None = None
        self._last: tuple[slice, Ids] | None = None

    @cached_property
    def z(self) -> Float[Tensor, "batch heads 1 keys*rows"]:
        """The scaled product of each key with each row, Eq. 27."""
        return product(self.x, table_matrix(self.table).mT, self.scale).flatten(2).unsqueeze(2)

    def write_products(self, block: Block, out: Scores) -> None:
        """Writes x . r_ij for the pairs of a block."""
        gather(self.z[block[:2]], self._index(block.queries), "nobody", out)

    def add_products(self, block: Block, scores: Scores) -> None:
        """Adds x . r_ij to the scores of a block, in place."""
        scores += gather(self.z[block[:2]], self._index(block.queries), "nobody")

    def collect(self, block: Block, scores: Scores) -> None:
        """Adds the pairs of a block to the sums."""
        if self.sums is None:
            batch, heads, keys, _ = self.x.shape
            self.sums = scores.new_zeros(batch, heads, 1, keys * self.table.shape[1])
        add_bucket_sum_(self.sums[block[:2]], scores, self._index(block.queries), "nobody")

    def combination(self) -> Tokens:
        """Returns the combination of all that was collected."""
        sums = self._row_sums().to(self.table.dtype)
        return product(sums, table_matrix(self.table), self.scale)

    def gradient(self) -> VectorTable:
        """Returns the gradient of the table from all that was collected."""
        return table_gradient(self._row_sums(), self.x, self.table, self.scale)

    def _row_sums(self) -> Sums:
        assert self.sums is not None
        return self.sums.view(*self.x.shape[:3], self.table.shape[1])

    def _index(self, queries: slice) -> Ids:
        """Returns the bucket of each pair of some queries; those blocks follow each other."""
        if self._last is None or self._last[0] != queries:
            ids, rows = self.ids[queries].long(), self.table.shape[1]
            starts = torch.arange(0, ids.shape[1] * rows, rows, device=ids.device)
            self._last = queries, ids + starts
        return self._last[1]


@dataclass(eq=False)
class QueryAxisTerm:
    """The efficient form for query tables whose buckets depend on one coordinate of the query."""

    x: Tokens
    table: VectorTable
    pattern: ByAxis
    scale: float

    def __post_init__(self) -> None:
        self.coordinates, self.ids = self.pattern.coordinates(), self.pattern.ids.mT.long()
        self.sums: Float[Tensor, "batch heads coordinate key"] | None = None

    @cached_property
    def narrow(self) -> Float[Tensor, "batch heads coordinate key"]:
        """The products of each key with the row of each coordinate of a query, Eq. 27-28."""
        z = product(self.x, table_matrix(self.table).mT, self.scale)
        return gather(z, self.ids, "key")

    def write_products(self, block: Block, out: Scores) -> None:
        """Writes x . r_ij for the pairs of a block."""
        torch.index_select(self.narrow[block[:2]], 2, self.coordinates[block.queries], out=out)

    def add_products(self, block: Block, scores: Scores) -> None:
        """Adds x . r_ij to the scores of a block, in place."""
        scores += self.narrow[block[:2]].index_select(2, self.coordinates[block.queries])

    def collect(self, block: Block, scores: Scores) -> None:
        """Adds the pairs of a block to the sums."""
        if self.sums is None:
            shape = (*self.x.shape[:2], *self.ids.shape)
            self.sums = scores.new_zeros(shape)
        self.sums[block[:2]].index_add_(2, self.coordinates[block.queries], scores)

    @cached_property
    def _row_sums(self) -> Sums:
        assert self.sums is not None
        return bucket_sum(self.sums, self.ids, self.table.shape[1], "key")

    def combination(self) -> Tokens:
        """Returns the combination of all that was collected."""
        sums = self._row_sums.to(self.table.dtype)
        return product(sums, table_matrix(self.table), self.scale)

    def gradient(self) -> VectorTable:
        """Returns the gradient of the table from all that was collected."""
        return table_gradient(self._row_sums, self.x, self.table, self.scale)


@dataclass(eq=False)
class PairTerm:
    """The direct form: the rows of a block's pairs are laid out."""

    x: Tokens
    table: VectorTable
    ids: Ids
    scale: float
    owner: Owner = "query"

    def __post_init__(self) -> None:
        self.token = "bhjd" if self.owner == "key" else "bhid"
        self.row = "ijd" if self.table.shape[0] == 1 else "hijd"
        self.combined: Tokens | None = None
        self.table_sums: VectorTable | None = None

    def write_products(self, block: Block, out: Scores) -> None:
        """Writes x . r_ij for the pairs of a block."""
        out.copy_(self._products(block))

    def add_products(self, block: Block, scores: Scores) -> None:
        """Adds x . r_ij to the scores of a block, in place."""
        scores += self._products(block)

    def _products(self, block: Block) -> Scores:
        x = _wide(self.x[_owners(block, self.owner)]) * self.scale
        return torch.einsum(f"{self.token},{self.row}->bhij", x, self._rows(block))

    def collect(self, block: Block, scores: Scores) -> None:
        """Adds the pairs of a block to the sums."""
        owners = _owners(block, self.owner)
        rows = self._rows(block) * self.scale
        combined = torch.einsum(f"bhij,{self.row}->{self.token}", scores, rows)
        if self.combined is None:
            self.combined = combined.new_zeros(self.x.shape)
        self.combined[owners] += combined
        if self.table_sums is None:
            self.table_sums = torch.zeros_like(self.table, dtype=scores.dtype)
        heads = self.table_sums if self.table.shape[0] == 1 else self.table_sums[block.heads]
        of_pairs = torch.einsum(f"bhij,{self.token}->{self.row}", scores, _wide(self.x[owners]))
        of_pairs = of_pairs.reshape(heads.shape[0], -1, heads.shape[2])
        heads.index_add_(1, self.ids[block.queries].flatten().long(), of_pairs)

    def combination(self) -> Tokens:
        """Returns the combination of all that was collected."""
        assert self.combined is not None
        return self.combined

    def gradient(self) -> VectorTable:
        """Returns the gradient of the table from all that was collected."""
        assert self.table_sums is not None
        return self.table_sums * self.scale

    def _rows(self, block: Block) -> Float[Tensor, "*heads query key dim"]:
        table = self.table if self.table.shape[0] == 1 else self.table[block.heads]
        return table_matrix(_wide(table))[..., self.ids[block.queries].long(), :]


Term = BucketTerm | KeyBucketTerm | QueryAxisTerm | PairTerm


def _owners(block: Block, owner: Owner) -> tuple[slice, slice, slice]:
    """Returns where the tokens of a block's pairs are."""
    return block.batch, block.heads, slice(None) if owner == "key" else block.queries


def _wide(tensor: Tensor) -> Tensor:
    return cast(tensor, accumulation_dtype(tensor.dtype))
