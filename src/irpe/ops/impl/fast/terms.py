"""The sums in which a table of vectors meets the tokens.

With r_ij the table row of pair (i, j), x_i a token and a_ij a score or weight of the pair:

- scores       y_ij = x_i . r_ij                                   (Eq. 15, 16 and 26)
- combination  x_i  = sum_j a_ij r_ij                              (Eq. 17)
- gradient     dr_t = sum of a_ij x_i over the pairs with I(i, j) = t

The scores' gradient in x is a combination and the combination's gradient in a are scores, so these
three carry keys, queries and values, forward and backward. The owner says which token of a pair is
x: the query, or for query tables the key.

`RowTerm` multiplies each token with the rows in use, once for the whole call, and looks up what a
pair needs: n k d + n^2 operations (Eq. 27-28). `PairTerm` multiplies the row of each pair, n^2 d
operations, which is less where a token has fewer pairs than the table rows.
"""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from irpe.core.bucket_map import BucketMap
from irpe.ops.call import head_slices
from irpe.ops.gather import Owner
from irpe.ops.impl.fast.lookups import (
    AxesOfKeys,
    AxisOfQueries,
    BucketsOfKeys,
    BucketsOfQueries,
    Lookup,
)
from irpe.ops.impl.fast.slices import Slice, part, part_of_keys
from irpe.ops.precision import accumulation_dtype, cast, product
from irpe.ops.shapes import Scores, Tokens, VectorTable
from irpe.ops.table_products import table_gradient, table_matrix

_FEW_PAIRS = 2**12  # of a head, up to which an element is looked up for each of them
Use = Literal["combination", "gradient", "both"]


class Term(Protocol):
    """One table, or those of several axes joined, and the tokens that it is multiplied with.

    Attributes:
        per_pair: How many elements it makes for each head and pair of tokens.
    """

    per_pair: int

    def scores(self, place: Slice) -> Scores:
        """Returns x . r_ij, scaled, for the pairs of a slice."""
        ...

    def collect(self, place: Slice, pairs: Scores, use: Use = "both") -> None:
        """Takes in the scores or weights of a slice, for what they will be used."""
        ...

    def add_combination_(self, out: Tokens) -> None:
        """Adds to each token the scaled combination of all that was collected."""
        ...

    def gradients(self) -> list[VectorTable]:
        """Returns the gradient of each table from all that was collected."""
        ...


class RowTerm:
    """The efficient form: a score, or a sum, for each token and table row."""

    per_pair = 1

    def __init__(
        self, x: Tokens, tables: Sequence[VectorTable], dims: slice, lookup: Lookup, scale: float
    ) -> None:
        self.x = x if dims == slice(None) else x[..., dims]
        self.dims, self.lookup, self.scale = dims, lookup, scale
        self.rows = [table.shape[1] for table in tables]
        self.table = tables[0] if len(tables) == 1 else torch.cat(list(tables), dim=1)
        self.sums: Tensor | None = None
        self._values: Tensor | None = None

    def scores(self, place: Slice) -> Scores:
        """Returns x . r_ij, scaled, for the pairs of a slice: Eq. 28."""
        if self._values is None:
            self._values = self.lookup.prepare(self._z())
        return self.lookup.look_up(self._values, place)

    def _z(self) -> Tensor:
        """Returns the scaled product of each token with each row, Eq. 27."""
        if self.table.shape[0] == 1 and self.table.dtype.itemsize > 2:
            return F.linear(self.x, self.table[0] * self.scale)
        return product(self.x, table_matrix(self.table).mT, self.scale)

    def collect(self, place: Slice, pairs: Scores, use: Use = "both") -> None:
        """Adds the pairs of a slice to the sums, which serve both uses."""
        if self.sums is None:
            self.sums = self.lookup.new_sums(pairs, self.x.shape[:3], self.table.shape[1])
        self.lookup.add_up_(self.sums, place, pairs)

    def add_combination_(self, out: Tokens) -> None:
        """Adds to each token its sums times the rows of the table."""
        sums, table = self._sums_of_rows(), self.table
        if table.shape[0] == 1 and table.dtype == out.dtype and self.dims == slice(None):
            flat = out.view(-1, out.shape[-1])
            torch.addmm(flat, sums.flatten(0, 2), table[0], alpha=self.scale, out=flat)
        else:
            found = product(cast(sums, table.dtype), table_matrix(table), self.scale)
            out[..., self.dims].add_(found)

    def gradients(self) -> list[VectorTable]:
        """Returns the gradient of each table from the sums."""
        found = table_gradient(self._sums_of_rows(), self.x, self.table, self.scale)
        if len(self.rows) == 1:
            return [found]
        return [rows.clone() for rows in found.split(self.rows, dim=1)]  # share no memory

    def _sums_of_rows(self) -> Tensor:
        assert self.sums is not None
        return self.lookup.sums_of_rows(self.sums, self.table.shape[1])


class PairTerm:
    """The direct form: the rows of a slice's pairs are laid out."""

    def __init__(
        self,
        x: Tokens,
        table: VectorTable,
        dims: slice,
        bucket_map: BucketMap,
        scale: float,
        owner: Owner,
    ) -> None:
        self.x, self.table, self.dims = x[..., dims], table, dims
        self.bucket_map, self.scale, self.owner = bucket_map, scale, owner
        self.per_pair = table.shape[0] * x.shape[3] // x.shape[1] + 1  # a vector, for all heads
        of_image = "b" if bucket_map.compact_ids.ndim == 3 else ""
        of_head = "" if table.shape[0] == 1 else "h"
        self.token = "bhjd" if owner == "key" else "bhid"
        self.row = f"{of_head}{of_image}ijd"
        self.combined: Tokens | None = None
        self.table_sums: VectorTable | None = None

    def scores(self, place: Slice) -> Scores:
        """Returns x . r_ij, scaled, for the pairs of a slice."""
        x = _wide(self._tokens(self.x, place)) * self.scale
        found = torch.einsum(f"{self.token},{self.row}->bhij", x, self._rows(place))
        return found.contiguous()

    def collect(self, place: Slice, pairs: Scores, use: Use = "both") -> None:
        """Adds the pairs of a slice to the combination, to the gradient of the table, or both."""
        if use != "gradient":
            combined = torch.einsum(f"bhij,{self.row}->{self.token}", pairs, self._rows(place))
            if self.combined is None:
                self.combined = combined.new_zeros(self.x.shape)
            self._tokens(self.combined, place).add_(combined, alpha=self.scale)
        if use == "combination":
            return
        if self.table_sums is None:
            self.table_sums = torch.zeros_like(self.table, dtype=pairs.dtype)
        x = _wide(self._tokens(self.x, place))
        of_pairs = torch.einsum(f"bhij,{self.token}->{self.row}", pairs, x)
        heads = self.table_sums if self.table.shape[0] == 1 else self.table_sums[place.heads]
        of_pairs = of_pairs.reshape(heads.shape[0], -1, heads.shape[2])
        heads.index_add_(1, self._index(place).flatten(), of_pairs)

    def add_combination_(self, out: Tokens) -> None:
        """Adds to each token its combination."""
        assert self.combined is not None
        out[..., self.dims].add_(self.combined)

    def gradients(self) -> list[VectorTable]:
        """Returns the gradient of the table."""
        assert self.table_sums is not None
        return [self.table_sums.mul_(self.scale)]

    def _tokens(self, x: Tensor, place: Slice) -> Tensor:
        return part_of_keys(x, place) if self.owner == "key" else part(x, place)

    def _rows(self, place: Slice) -> Tensor:
        table = self.table if self.table.shape[0] == 1 else self.table[place.heads]
        return table_matrix(_wide(table))[..., self._index(place), :]

    def _index(self, place: Slice) -> Tensor:
        index = self.bucket_map.index(place.queries)
        return index[place.images] if index.ndim == 3 else index


def make_terms(
    x: Tokens,
    tables: Sequence[VectorTable],
    maps: Sequence[BucketMap],
    scale: float,
    owner: Owner = "query",
) -> list[Term]:
    """Returns the terms of one kind of tables, each in the form that takes fewer operations.

    There is a term for each table, or one for all of them if each depends on one axis of the grid
    of the keys and all have the same heads and the whole head dimension.

    Args:
        x: The tokens.
        tables: The tables, restricted to the rows in use.
        maps: The map of each table.
        scale: A factor of all scores.
        owner: Which token of a pair is x.
    """
    dim = x.shape[-1]
    *_, queries, keys = maps[0].compact_ids.shape
    is_small = queries * keys <= _FEW_PAIRS
    axes = [None if is_small else bucket_map.key_axis for bucket_map in maps]
    pairs_of_token = keys if owner == "query" else queries
    if len(tables) > 1 and owner == "query" and None not in axes:
        shapes = {(table.shape[0], table.shape[2]) for table in tables}
        fits = all(table.shape[1] <= pairs_of_token for table in tables)
        if fits and len(shapes) == 1 and tables[0].shape[2] == dim:
            return [RowTerm(x, tables, slice(None), AxesOfKeys(maps), scale)]
    terms: list[Term] = []
    slices = [slice(None)] if len(tables) == 1 else head_slices(tables, dim)
    for table, dims, bucket_map, axis in zip(tables, slices, maps, axes, strict=True):
        if table.shape[1] > pairs_of_token:
            terms.append(PairTerm(x, table, dims, bucket_map, scale, owner))
            continue
        if owner == "query":
            lookup = BucketsOfQueries(bucket_map) if axis is None else AxesOfKeys([bucket_map])
        elif axis is not None and axis.of_queries:
            lookup = AxisOfQueries(bucket_map, axis)
        else:
            lookup = BucketsOfKeys(bucket_map)
        terms.append(RowTerm(x, [table], dims, lookup, scale))
    return terms


def _wide(tensor: Tensor) -> Tensor:
    return cast(tensor, accumulation_dtype(tensor.dtype))
