"""The sums in which a table of vectors meets the tokens.

With r_ij the table row of pair (i, j), x_i a token and a_ij a score or weight of the pair:

- scores       y_ij = x_i . r_ij                                   (Eq. 15, 16 and 26)
- combination  x_i  = sum_j a_ij r_ij                              (Eq. 17)
- gradient     dr_t = sum of a_ij x_i over the pairs with I(i, j) = t

The scores' gradient in x is a combination and the combination's gradient in a are scores, so these
three carry keys, queries and values, forward and backward. The owner says which token of a pair is
x: the query, or for query tables the key.

A `RowTerm` multiplies each token with the rows in use, once for the whole call, and looks up what a
pair needs: n k d + n^2 operations (Eq. 27-28). A `PairTerm` multiplies the row of each pair, n^2 d
operations, which is less where a token has fewer pairs than the table rows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float, Integer
from torch import Tensor

from irpe.core.bucket_map import BucketMap
from irpe.ops.call import head_slices
from irpe.ops.gather import Owner, add_bucket_sum_, bucket_sum, gather
from irpe.ops.impl.fast.slices import ALL, Slice, part, part_of_keys
from irpe.ops.precision import accumulation_dtype, cast, product
from irpe.ops.shapes import Scores, Tokens, VectorTable
from irpe.ops.table_products import table_gradient, table_matrix

_FEW_PAIRS = 2**12  # of a head, up to which an element is looked up for each of them
Use = Literal["combination", "gradient", "both"]
Sums = Float[Tensor, "batch heads tokens rows"]


def make_terms(
    x: Tokens,
    tables: Sequence[VectorTable],
    maps: Sequence[BucketMap],
    scale: float,
    owner: Owner = "query",
) -> "list[Term]":
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
            return [AxesOfKeys(x, tables, maps, slice(None), scale)]
    terms: list[Term] = []
    slices = [slice(None)] if len(tables) == 1 else head_slices(tables, dim)
    for table, dims, bucket_map, axis in zip(tables, slices, maps, axes, strict=True):
        if table.shape[1] > pairs_of_token:
            terms.append(PairTerm(x, table, dims, bucket_map, scale, owner))
            continue
        if owner == "query":
            form = BucketsOfQueries if axis is None else AxesOfKeys
        else:
            form = BucketsOfKeys if axis is None or not axis.of_queries else AxisOfQueries
        terms.append(form(x, [table], [bucket_map], dims, scale))
    return terms


class RowTerm(ABC):
    """The efficient form: a score, or a sum, for each token and table row.

    Subclasses look the score of a pair up among them, and add pairs up into sums: the two are each
    other's adjoint. Tables of several maps are joined in their order.
    """

    per_pair = 1  # how many elements it makes for each head and pair of tokens

    def __init__(
        self,
        x: Tokens,
        tables: Sequence[VectorTable],
        maps: Sequence[BucketMap],
        dims: slice,
        scale: float,
    ) -> None:
        x = x if dims == slice(None) else x[..., dims]
        self.x = x.contiguous()  # products with it are then one large product
        self.dims, self.scale, self.maps = dims, scale, maps
        self.rows = [table.shape[1] for table in tables]
        self.table = tables[0] if len(tables) == 1 else torch.cat(list(tables), dim=1)
        self.sums: Tensor | None = None
        self._values: Tensor | None = None
        self._last: tuple[slice, Tensor] | None = None

    def scores(self, place: Slice) -> Scores:
        """Returns x . r_ij, scaled, for the pairs of a slice: Eq. 28."""
        if self._values is None:  # Eq. 27
            if self.table.shape[0] == 1 and self.table.dtype.itemsize > 2:
                z = F.linear(self.x, self.table[0] * self.scale)
            else:
                z = product(self.x, table_matrix(self.table).mT, self.scale)
            self._values = self._spread(z)
        return self._look_up(self._values, place)

    def collect(self, place: Slice, pairs: Scores, use: Use = "both") -> None:
        """Adds the pairs of a slice to the sums, which serve both uses."""
        if self.sums is None:
            self.sums = pairs.new_zeros(self._shape_of_sums())
        self._add_up_(self.sums, place, pairs)

    def add_combination_(self, out: Tokens) -> None:
        """Adds to each token the scaled combination of all that was collected."""
        sums, table = self._sums_of_rows(), self.table
        if table.shape[0] == 1 and table.dtype == out.dtype and self.dims == slice(None):
            flat = out.view(-1, out.shape[-1])
            torch.addmm(flat, sums.flatten(0, 2), table[0], alpha=self.scale, out=flat)
        else:
            found = product(cast(sums, table.dtype), table_matrix(table), self.scale)
            out[..., self.dims].add_(found)

    def gradients(self) -> list[VectorTable]:
        """Returns the gradient of each table from all that was collected."""
        found = table_gradient(self._sums_of_rows(), self.x, self.table, self.scale)
        if len(self.rows) == 1:
            return [found]
        return [rows.clone() for rows in found.split(self.rows, dim=1)]  # share no memory

    @abstractmethod
    def _look_up(self, values: Tensor, place: Slice) -> Scores:
        """Returns the score of each pair of a slice."""

    @abstractmethod
    def _add_up_(self, sums: Tensor, place: Slice, pairs: Scores) -> None:
        """Adds the pairs of a slice to the sums."""

    def _make_index(self, queries: slice) -> Integer[Tensor, "*image query key"]:
        """Returns the 64-bit index of pairs among the scores of a token, for some queries."""
        return self.maps[0].index[..., queries, :].long()

    def _spread(self, z: Sums) -> Tensor:
        """Returns what `_look_up` reads, made once for a call."""
        return z

    def _shape_of_sums(self) -> Sequence[int]:
        return *self.x.shape[:3], self.table.shape[1]

    def _sums_of_rows(self) -> Sums:
        """Returns the sums for each token and table row."""
        assert self.sums is not None
        return self.sums

    def _index(self, place: Slice) -> Integer[Tensor, "*image_and_head query key"]:
        """Returns the index of a slice; slices of the same queries follow each other."""
        if self._last is None or self._last[0] != place.queries:
            self._last = None  # two of them are much memory
            index = self._make_index(place.queries)
            self._last = place.queries, index if index.ndim == 2 else index.unsqueeze(1)
        index = self._last[1]
        return index if index.ndim == 2 or place is ALL else index[place.images]


class BucketsOfQueries(RowTerm):
    """An id for each key; the token is the query."""

    def _look_up(self, values: Tensor, place: Slice) -> Scores:
        values, index = part(values, place), self._index(place)
        return torch.gather(values, -1, index.expand(*values.shape[:3], index.shape[-1]))

    def _add_up_(self, sums: Tensor, place: Slice, pairs: Scores) -> None:
        add_bucket_sum_(part(sums, place), pairs, self._index(place), "query")


class BucketsOfKeys(RowTerm):
    """An id for each query; the token is the key.

    The rows of all keys are one set, so that the index of a pair in it is the same for all heads.
    """

    def _spread(self, z: Sums) -> Tensor:
        return z.flatten(2).unsqueeze(2)

    def _look_up(self, values: Tensor, place: Slice) -> Scores:
        return gather(part_of_keys(values, place), self._index(place), "nobody")

    def _shape_of_sums(self) -> Sequence[int]:
        batch, heads, keys = self.x.shape[:3]
        return batch, heads, 1, keys * self.table.shape[1]

    def _add_up_(self, sums: Tensor, place: Slice, pairs: Scores) -> None:
        add_bucket_sum_(part_of_keys(sums, place), pairs, self._index(place), "nobody")

    def _sums_of_rows(self) -> Sums:
        return super()._sums_of_rows().view(*self.x.shape[:3], -1)

    def _make_index(self, queries: slice) -> Integer[Tensor, "*image query key"]:
        index, rows = super()._make_index(queries), self.table.shape[1]
        return index + torch.arange(index.shape[-1], device=index.device) * rows


class AxesOfKeys(RowTerm):
    """An id for each coordinate of the key on one axis, or on each of several: `cross`.

    One score for each coordinate is looked up and spread over the grid; those of axes are summed.
    """

    def __init__(
        self,
        x: Tokens,
        tables: Sequence[VectorTable],
        maps: Sequence[BucketMap],
        dims: slice,
        scale: float,
    ) -> None:
        super().__init__(x, tables, maps, dims, scale)
        axes = [bucket_map.key_axis for bucket_map in maps]
        assert axes[0] is not None
        self.grid, self.axes = axes[0].grid, [axis.axis for axis in axes if axis is not None]
        self.num_prefix_tokens = maps[0].compact_ids.shape[1] - math.prod(self.grid)

    def _look_up(self, values: Tensor, place: Slice) -> Scores:
        found = gather(part(values, place), self._index(place), "query")
        scores = found.new_empty(*found.shape[:3], self.num_prefix_tokens + math.prod(self.grid))
        for whole, (first, *others) in self._views(scores, found):
            if others:
                torch.add(first.expand(whole.shape), others[0], out=whole)  # one pass for two axes
            else:
                whole.copy_(first)
            for other in others[1:]:
                whole += other
        return scores

    def _add_up_(self, sums: Tensor, place: Slice, pairs: Scores) -> None:
        """Adds those of one coordinate first."""
        count, ndim = self.num_prefix_tokens, len(self.grid)
        patches = pairs[..., count:].unflatten(-1, self.grid)
        prefix = [pairs[..., :count].sum(-1, keepdim=True)] if count else []
        found: list[Tensor] = []
        for axis in self.axes:
            others = [number - ndim for number in range(ndim) if number != axis]
            found += [patches.sum(others) if others else patches, *prefix]
        joined = torch.cat(found, dim=-1)
        add_bucket_sum_(part(sums, place), joined, self._index(place), "query")

    def _make_index(self, queries: slice) -> Integer[Tensor, "query coordinate"]:
        ids: list[Tensor] = []
        start = 0
        for bucket_map, axis in zip(self.maps, self.axes, strict=True):
            of_keys = bucket_map.compact_ids[queries]
            of_axis = _by_coordinate(of_keys, self.grid, axis, self.num_prefix_tokens)
            ids.append(of_axis.long() + start)
            start += bucket_map.num_used_buckets
        return torch.cat(ids, dim=1)

    def _views(self, scores: Scores, found: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
        """Returns the patches and the prefix tokens, each beside what is broadcast to them."""
        count = self.num_prefix_tokens
        parts = found.split([self.grid[axis] + (count > 0) for axis in self.axes], dim=-1)
        to_patches = [
            of_axis[..., : self.grid[axis]].unflatten(
                -1, [size if number == axis else 1 for number, size in enumerate(self.grid)]
            )
            for axis, of_axis in zip(self.axes, parts, strict=True)
        ]
        views = [(scores[..., count:].unflatten(-1, self.grid), to_patches)]
        to_prefix = [of_axis[..., -1:] for of_axis in parts]
        return [*views, (scores[..., :count], to_prefix)] if count else views


class AxisOfQueries(RowTerm):
    """An id for each coordinate of the query on one axis; the token is the key."""

    def __init__(
        self,
        x: Tokens,
        tables: Sequence[VectorTable],
        maps: Sequence[BucketMap],
        dims: slice,
        scale: float,
    ) -> None:
        super().__init__(x, tables, maps, dims, scale)
        ids, key_axis = maps[0].compact_ids, maps[0].key_axis
        assert key_axis is not None
        grid, axis, _ = key_axis
        count, size = ids.shape[0] - math.prod(grid), grid[axis]
        tokens = torch.arange(math.prod(grid), device=ids.device)
        coordinates = tokens // math.prod(grid[axis + 1 :]) % size
        self._coordinates = F.pad(coordinates, (count, 0), value=size)
        self._ids = _by_coordinate(ids.mT, grid, axis, count).mT.long()  # coordinate key

    def _spread(self, z: Sums) -> Tensor:
        """Returns the score of each coordinate of a query and each key."""
        return gather(z, self._ids, "key")

    def _look_up(self, values: Tensor, place: Slice) -> Scores:
        return part_of_keys(values, place).index_select(2, self._coordinates[place.queries])

    def _shape_of_sums(self) -> Sequence[int]:
        return *self.x.shape[:2], *self._ids.shape

    def _add_up_(self, sums: Tensor, place: Slice, pairs: Scores) -> None:
        part_of_keys(sums, place).index_add_(2, self._coordinates[place.queries], pairs)

    def _sums_of_rows(self) -> Sums:
        return bucket_sum(super()._sums_of_rows(), self._ids, self.table.shape[1], "key")


def _by_coordinate(
    ids: Integer[Tensor, "other token"], grid: tuple[int, ...], axis: int, num_prefix_tokens: int
) -> Integer[Tensor, "other coordinate"]:
    """Returns the ids of a token at each coordinate of an axis, then of a prefix token, if any."""
    stride, first = math.prod(grid[axis + 1 :]), num_prefix_tokens
    patches = ids[:, first : first + grid[axis] * stride : stride]
    return torch.cat([patches, ids[:, :1]], dim=1) if num_prefix_tokens else patches


class PairTerm:
    """The direct form: the rows of a slice's pairs are laid out. Methods as those of `RowTerm`."""

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
        index = self.bucket_map.index[..., place.queries, :].long()
        return index[place.images] if index.ndim == 3 else index


Term = RowTerm | PairTerm


def _wide(tensor: Tensor) -> Tensor:
    return cast(tensor, accumulation_dtype(tensor.dtype))
