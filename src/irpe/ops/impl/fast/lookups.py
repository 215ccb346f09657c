"""How the scores of pairs are looked up among those of tokens and table rows, and summed up again.

The two are each other's adjoint, on any slice of a call. In `cross` the bucket depends on one
coordinate of the key, so one score for each coordinate is looked up and spread over the grid.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from irpe.core.bucket_map import BucketMap, KeyAxis
from irpe.ops.gather import add_bucket_sum_, bucket_sum, gather
from irpe.ops.impl.fast.slices import ALL, Slice, part, part_of_keys
from irpe.ops.shapes import Scores

Sums = Float[Tensor, "batch heads tokens rows"]


class Lookup(Protocol):
    """From a score for each token and table row to one for each pair, and back."""

    def prepare(self, z: Sums) -> Tensor:
        """Returns what `look_up` reads, made once for a call."""
        ...

    def look_up(self, values: Tensor, place: Slice) -> Scores:
        """Returns the score of each pair of a slice."""
        ...

    def new_sums(self, pairs: Scores, tokens: Sequence[int], rows: int) -> Tensor:
        """Returns zeros for `add_up_`, with the dtype of the pairs."""
        ...

    def add_up_(self, sums: Tensor, place: Slice, pairs: Scores) -> None:
        """Adds the pairs of a slice to the sums."""
        ...

    def sums_of_rows(self, sums: Tensor, rows: int) -> Sums:
        """Returns the sums for each token and table row."""
        ...


class BucketsOfQueries:
    """An id for each key; the token is the query."""

    def __init__(self, bucket_map: BucketMap) -> None:
        self._map = bucket_map
        self._last: tuple[slice, Tensor] | None = None

    def prepare(self, z: Sums) -> Tensor:
        """Returns z itself."""
        return z

    def look_up(self, values: Tensor, place: Slice) -> Scores:
        """Returns the score of each pair of a slice."""
        values = values if place is ALL else values[place]
        return gather(values, self._index(place), "query")

    def new_sums(self, pairs: Scores, tokens: Sequence[int], rows: int) -> Tensor:
        """Returns zeros for each query and row."""
        return pairs.new_zeros(*tokens, rows)

    def add_up_(self, sums: Tensor, place: Slice, pairs: Scores) -> None:
        """Adds the pairs of a slice to the sums."""
        add_bucket_sum_(part(sums, place), pairs, self._index(place), "query")

    def sums_of_rows(self, sums: Tensor, rows: int) -> Sums:
        """Returns the sums themselves."""
        return sums

    def _index(self, place: Slice) -> Integer[Tensor, "*batch_and_head query key"]:
        """Returns the 64-bit ids of a slice; slices of the same queries follow each other."""
        if place is ALL:
            index = self._map.index()
            return index if index.ndim == 2 else index.unsqueeze(1)
        if self._last is None or self._last[0] != place.queries:
            index = self._map.index(place.queries)
            self._last = place.queries, index if index.ndim == 2 else index.unsqueeze(1)
        index = self._last[1]
        return index if index.ndim == 2 else index[place.images]


class BucketsOfKeys:
    """An id for each query; the token is the key.

    The rows of all keys are one set, so that the index of a pair in it is the same for all heads.
    """

    def __init__(self, bucket_map: BucketMap) -> None:
        self._map = bucket_map
        self._last: tuple[slice, Tensor] | None = None

    def prepare(self, z: Sums) -> Tensor:
        """Returns the scores of all keys and rows, one after the other."""
        return z.flatten(2).unsqueeze(2)

    def look_up(self, values: Tensor, place: Slice) -> Scores:
        """Returns the score of each pair of a slice."""
        return gather(part_of_keys(values, place), self._index(place), "nobody")

    def new_sums(self, pairs: Scores, tokens: Sequence[int], rows: int) -> Tensor:
        """Returns zeros for each key and row, one after the other."""
        batch, heads, keys = tokens
        return pairs.new_zeros(batch, heads, 1, keys * rows)

    def add_up_(self, sums: Tensor, place: Slice, pairs: Scores) -> None:
        """Adds the pairs of a slice to the sums."""
        add_bucket_sum_(part_of_keys(sums, place), pairs, self._index(place), "nobody")

    def sums_of_rows(self, sums: Tensor, rows: int) -> Sums:
        """Returns the sums for each key and row."""
        return sums.view(*sums.shape[:2], -1, rows)

    def _index(self, place: Slice) -> Integer[Tensor, "*batch_and_head query key"]:
        """Returns each pair's place in that set; slices of the same queries follow each other."""
        if self._last is None or self._last[0] != place.queries:
            index, rows = self._map.index(place.queries), self._map.num_used_buckets
            index = index + torch.arange(index.shape[-1], device=index.device) * rows
            self._last = place.queries, index if index.ndim == 2 else index.unsqueeze(1)
        index = self._last[1]
        return index if index.ndim == 2 or place is ALL else index[place.images]


class AxesOfKeys:
    """An id for each coordinate of the key on one axis, or on each of several; these are summed.

    Args:
        maps: The map of each axis; their tables are joined in this order.
    """

    def __init__(self, maps: Sequence[BucketMap]) -> None:
        axes = [bucket_map.key_axis for bucket_map in maps]
        assert axes[0] is not None
        self.grid, self.axes = axes[0].grid, [axis.axis for axis in axes if axis is not None]
        self.num_prefix_tokens = maps[0].compact_ids.shape[1] - math.prod(self.grid)
        self._last: tuple[slice, Tensor] | None = None
        starts = [0]
        for bucket_map in maps:
            starts.append(starts[-1] + bucket_map.num_used_buckets)
        self._maps = list(zip(maps, self.axes, starts[:-1], strict=True))

    def prepare(self, z: Sums) -> Tensor:
        """Returns z itself."""
        return z

    def look_up(self, values: Tensor, place: Slice) -> Scores:
        """Returns the score of each pair of a slice: the sum of those of its coordinates."""
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

    def new_sums(self, pairs: Scores, tokens: Sequence[int], rows: int) -> Tensor:
        """Returns zeros for each query and row."""
        return pairs.new_zeros(*tokens, rows)

    def add_up_(self, sums: Tensor, place: Slice, pairs: Scores) -> None:
        """Adds the pairs of a slice to the sums, those of one coordinate first."""
        count, ndim = self.num_prefix_tokens, len(self.grid)
        patches = pairs[..., count:].unflatten(-1, self.grid)
        prefix = [pairs[..., :count].sum(-1, keepdim=True)] if count else []
        found: list[Tensor] = []
        for axis in self.axes:
            others = [number - ndim for number in range(ndim) if number != axis]
            found += [patches.sum(others) if others else patches, *prefix]
        joined = torch.cat(found, dim=-1)
        add_bucket_sum_(part(sums, place), joined, self._index(place), "query")

    def sums_of_rows(self, sums: Tensor, rows: int) -> Sums:
        """Returns the sums themselves."""
        return sums

    def _index(self, place: Slice) -> Integer[Tensor, "query coordinate"]:
        if self._last is None or self._last[0] != place.queries:
            ids = [
                bucket_map.compact_ids[place.queries][:, self._tokens(axis, bucket_map)].long()
                + start
                for bucket_map, axis, start in self._maps
            ]
            self._last = place.queries, torch.cat(ids, dim=1)
        return self._last[1]

    def _tokens(self, axis: int, bucket_map: BucketMap) -> Integer[Tensor, " coordinate"]:
        """Returns a key for each coordinate of an axis, then a prefix token, if any."""
        count = self.num_prefix_tokens
        stride, device = math.prod(self.grid[axis + 1 :]), bucket_map.compact_ids.device
        tokens = count + torch.arange(self.grid[axis], device=device) * stride
        return torch.cat([tokens, tokens.new_zeros(1)]) if count else tokens

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


class AxisOfQueries:
    """An id for each coordinate of the query on one axis; the token is the key."""

    def __init__(self, bucket_map: BucketMap, axis: KeyAxis) -> None:
        ids = bucket_map.compact_ids
        count, size = ids.shape[0] - math.prod(axis.grid), axis.grid[axis.axis]
        stride = math.prod(axis.grid[axis.axis + 1 :])
        coordinates = torch.arange(ids.shape[0] - count, device=ids.device) // stride % size
        self._coordinates = torch.cat([coordinates.new_full((count,), size), coordinates])
        tokens = count + torch.arange(size, device=ids.device) * stride
        tokens = torch.cat([tokens, tokens.new_zeros(1)]) if count else tokens
        self._ids = ids[tokens].long()  # coordinate key

    def prepare(self, z: Sums) -> Tensor:
        """Returns the score of each coordinate of a query and each key."""
        return gather(z, self._ids, "key")

    def look_up(self, values: Tensor, place: Slice) -> Scores:
        """Returns the score of each pair of a slice."""
        return part_of_keys(values, place).index_select(2, self._coordinates[place.queries])

    def new_sums(self, pairs: Scores, tokens: Sequence[int], rows: int) -> Tensor:
        """Returns zeros for each coordinate of a query and each key."""
        return pairs.new_zeros(*tokens[:2], *self._ids.shape)

    def add_up_(self, sums: Tensor, place: Slice, pairs: Scores) -> None:
        """Adds the pairs of a slice to the sums."""
        part_of_keys(sums, place).index_add_(2, self._coordinates[place.queries], pairs)

    def sums_of_rows(self, sums: Tensor, rows: int) -> Sums:
        """Returns the sums for each key and row."""
        return bucket_sum(sums, self._ids, rows, "key")
