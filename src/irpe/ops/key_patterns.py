"""How the keys' buckets repeat over a grid, so that a query need not gather one for each key.

In `cross` the bucket depends on one coordinate of the key, in `product` far rows of the grid have
equal buckets. A pattern holds the narrow ids, one for each group of keys with equal buckets, and
expands what was gathered for them to all keys. It is found by comparing ids, so it holds whatever
method made them; prefix tokens stand before the grid.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from irpe.core.constants import traced_as_constant
from irpe.ops.shapes import Scores

Narrow = Float[Tensor, "batch heads query narrow"]  # an element for each group of keys
_PAIRS_AT_ONCE = 2**20  # compared at a time
# Distinct rows are worth a pattern where each stands for so many (a prefix takes a copy more) ...
_REPEATS, _REPEATS_WITH_PREFIX = 4, 8
_MIN_WIDTH = 16  # ... of at least so many keys


class Dense(NamedTuple):
    """Nothing repeats: an id for each key."""

    ids: Integer[Tensor, "query key"]

    def at(self, queries: slice) -> "Dense":
        """Returns the pattern of some queries."""
        return Dense(self.ids[queries])

    def expand(self, narrow: Narrow, out: Scores) -> None:
        """Writes to `out` the element of each key's group."""
        out.copy_(narrow)

    def add(self, narrow: Narrow, scores: Scores) -> None:
        """Adds to the score of every key the element of its group, in place."""
        scores += narrow

    def collect(self, scores: Scores) -> Narrow:
        """Returns the sums over each group of keys: the adjoint of `expand`."""
        return scores


class ByAxis(NamedTuple):
    """The bucket depends on one axis of the grid: an id for each coordinate on it.

    Several axes are summed, each with rows of its own in one table.

    Args:
        ids: For each axis in turn the ids of its coordinates, then that of prefix tokens, if any.
        grid: The shape of the grid.
        axes: Which axes.
        num_prefix_tokens: How many keys stand before the grid.
    """

    ids: Integer[Tensor, "query coordinate"]
    grid: tuple[int, ...]
    axes: tuple[int, ...]
    num_prefix_tokens: int

    def at(self, queries: slice) -> "ByAxis":
        """Returns the pattern of some queries."""
        return self._replace(ids=self.ids[queries])

    def representatives(self) -> Integer[Tensor, " coordinate"]:
        """Returns a token for each coordinate of the one axis, then a prefix token, if any."""
        (axis,), first = self.axes, self.num_prefix_tokens
        stride = math.prod(self.grid[axis + 1 :])
        tokens = first + torch.arange(self.grid[axis], device=self.ids.device) * stride
        return torch.cat([tokens, tokens.new_zeros(1)]) if first else tokens

    def coordinates(self) -> Integer[Tensor, " token"]:
        """Returns each token's coordinate on the one axis; that of prefix tokens is the last."""
        (axis,) = self.axes
        patches = torch.arange(self.grid[axis], device=self.ids.device)
        patches = patches.view(self._along(axis)).expand(self.grid).flatten()
        return torch.cat([patches.new_full((self.num_prefix_tokens,), self.grid[axis]), patches])

    def expand(self, narrow: Narrow, out: Scores) -> None:
        """Writes to `out` the sum of the elements of each key's coordinates."""
        for whole, (part, *others) in self._views(out, narrow):
            if not others:
                whole.copy_(part)
                continue
            torch.add(part.expand(whole.shape), others[0], out=whole)  # one pass for two axes
            for other in others[1:]:
                whole += other

    def add(self, narrow: Narrow, scores: Scores) -> None:
        """Adds to the score of every key the elements of its coordinates, in place."""
        for whole, parts in self._views(scores, narrow):
            for part in parts:
                whole += part

    def collect(self, scores: Scores) -> Narrow:
        """Returns the sums over each group of keys: the adjoint of `expand`."""
        first, ndim = self.num_prefix_tokens, len(self.grid)
        patches = scores[..., first:].unflatten(-1, self.grid)
        prefix = [scores[..., :first].sum(-1, keepdim=True)] if first else []
        sums: list[Tensor] = []
        for axis in self.axes:
            others = [number - ndim for number in range(ndim) if number != axis]
            sums += [patches.sum(others), *prefix]
        return torch.cat(sums, dim=-1)

    def _views(self, scores: Scores, narrow: Narrow) -> list[tuple[Tensor, list[Tensor]]]:
        """Returns the patches and the prefix tokens, each beside what is broadcast to them."""
        first = self.num_prefix_tokens
        parts = narrow.split([self.grid[axis] + (first > 0) for axis in self.axes], dim=-1)
        to_patches = [
            part[..., : self.grid[axis]].unflatten(-1, self._along(axis))
            for axis, part in zip(self.axes, parts, strict=True)
        ]
        views = [(scores[..., first:].unflatten(-1, self.grid), to_patches)]
        to_prefix = [part[..., -1:] for part in parts]
        return [*views, (scores[..., :first], to_prefix)] if first else views

    def _along(self, axis: int) -> list[int]:
        return [size if number == axis else 1 for number, size in enumerate(self.grid)]


class RepeatedRows(NamedTuple):
    """Few of the grid's rows differ in their keys' buckets: ids for the distinct rows alone.

    Args:
        ids: The ids of prefix tokens, then those of the distinct rows, one row after the other.
        row_index: Which of the distinct rows each row of the grid is.
        width: The keys in a row of the grid.
        num_prefix_tokens: How many keys stand before the grid.
        membership: 1 where a row of the grid is a distinct row, else 0; made by `at`.
    """

    ids: Integer[Tensor, "query narrow"]
    row_index: Integer[Tensor, "query row"]
    width: int
    num_prefix_tokens: int
    membership: Bool[Tensor, "query distinct row"] | None = None

    def at(self, queries: slice) -> "RepeatedRows":
        """Returns the pattern of some queries."""
        ids, row_index = self.ids[queries], self.row_index[queries]
        distinct = (ids.shape[1] - self.num_prefix_tokens) // self.width
        rows = torch.arange(distinct, device=ids.device)[:, None]
        membership = row_index.unsqueeze(1) == rows
        return self._replace(ids=ids, row_index=row_index, membership=membership)

    def expand(self, narrow: Narrow, out: Scores) -> None:
        """Writes to `out` the element of each key's group."""
        first = self.num_prefix_tokens
        rows, index = self._rows(narrow)
        if not first and out.is_contiguous():
            torch.index_select(rows, 0, index, out=out.view(-1, self.width))
            return
        patches = out[..., first:]
        patches.copy_(rows.index_select(0, index).view(patches.shape))
        out[..., :first] = narrow[..., :first]

    def add(self, narrow: Narrow, scores: Scores) -> None:
        """Adds to the score of every key the element of its group, in place."""
        first = self.num_prefix_tokens
        rows, index = self._rows(narrow)
        patches = scores[..., first:]
        patches += rows.index_select(0, index).view(patches.shape)
        scores[..., :first] += narrow[..., :first]

    def collect(self, scores: Scores) -> Narrow:
        """Returns the sums over each group of keys: the adjoint of `expand`."""
        if self.membership is None:
            return self.at(slice(None)).collect(scores)
        first = self.num_prefix_tokens
        rows = scores[..., first:].unflatten(-1, (-1, self.width))
        sums = (self.membership.to(scores.dtype) @ rows).flatten(-2)
        return torch.cat([scores[..., :first], sums], dim=-1) if first else sums

    def _rows(
        self, narrow: Narrow
    ) -> tuple[Float[Tensor, "distinct width"], Integer[Tensor, " rows"]]:
        """Returns the distinct rows of all queries, and which of them each row of the grid is."""
        rows = narrow[..., self.num_prefix_tokens :].unflatten(-1, (-1, self.width))
        *batch, distinct, width = rows.shape
        starts = torch.arange(0, math.prod(batch) * distinct, distinct, device=narrow.device)
        index = (starts.view(*batch, 1) + self.row_index).flatten()
        return rows.reshape(-1, width), index


Pattern = Dense | ByAxis | RepeatedRows


class _Found(NamedTuple):
    """What was found in a tensor of ids; it must not hold the ids themselves, which would live on.

    Args:
        grid: The grid for which it was found.
        of_keys: The pattern of the keys, if they have one.
        of_queries: The pattern by axis of the queries, if they lie on the grid and have one.
    """

    grid: tuple[int, ...]
    of_keys: ByAxis | RepeatedRows | None
    of_queries: ByAxis | None


_found: Any = WeakIdKeyDictionary()  # for each tensor of ids, as long as it lives


def key_pattern(ids: Integer[Tensor, "*batch query key"], grid: Sequence[int] | None) -> Pattern:
    """Returns how the keys' buckets repeat; found once for each tensor of ids.

    Args:
        ids: The compact ids of a bucket map.
        grid: The grid of its keys, if they lie on one.
    """
    return _patterns(ids, grid).of_keys or Dense(ids)


def query_axis(
    ids: Integer[Tensor, "*batch query key"], grid: Sequence[int] | None
) -> ByAxis | None:
    """Returns the same for the queries of each key, where it depends on one axis of the grid."""
    return _patterns(ids, grid).of_queries


def join_axes(patterns: Sequence[ByAxis], rows: Sequence[int]) -> ByAxis:
    """Returns one pattern for several, whose tables are joined.

    Args:
        patterns: A pattern for each table, on one grid.
        rows: The number of rows of each table.
    """
    starts = [sum(rows[:number]) for number in range(len(rows))]
    ids = [p.ids.int() + start for p, start in zip(patterns, starts, strict=True)]
    axes = tuple(axis for pattern in patterns for axis in pattern.axes)
    return patterns[0]._replace(ids=torch.cat(ids, dim=1), axes=axes)


@traced_as_constant
def _patterns(ids: Tensor, grid: Sequence[int] | None) -> _Found:
    shape = tuple(grid or ())
    if len(shape) < 2 or ids.ndim != 2:
        return _Found(shape, None, None)
    found = _found.get(ids)
    if found is None or found.grid != shape:
        of_queries = _by_axis(ids.mT, shape) if ids.shape[0] == ids.shape[1] else None
        of_keys = _by_axis(ids, shape) or _repeated_rows(ids, shape)
        found = _found[ids] = _Found(shape, of_keys, of_queries)
    return found


def _by_axis(ids: Tensor, grid: tuple[int, ...]) -> ByAxis | None:
    first = ids.shape[1] - math.prod(grid)
    for axis in range(len(grid)):
        if _depends_on(ids, grid, axis):
            pattern = ByAxis(ids[:, :0], grid, (axis,), first)
            return pattern._replace(ids=ids[:, pattern.representatives()])
    return None


def _depends_on(ids: Tensor, grid: tuple[int, ...], axis: int) -> bool:
    """Tells whether the keys' ids depend on one axis alone, and prefix tokens have one id."""
    first = ids.shape[1] - math.prod(grid)
    for part in ids.split(max(1, _PAIRS_AT_ONCE // ids.shape[1])):
        patches = part[:, first:].unflatten(1, grid)
        for other in range(len(grid)):
            if other != axis and (patches != patches.narrow(1 + other, 0, 1)).any():
                return False
        if (part[:, :first] != part[:, :1]).any():
            return False
    return True


def _repeated_rows(ids: Tensor, grid: tuple[int, ...]) -> RepeatedRows | None:
    """Returns the pattern if few rows differ from the one before: buckets grow with distance."""
    height, width = math.prod(grid[:-1]), grid[-1]
    first = ids.shape[1] - height * width
    repeats = _REPEATS_WITH_PREFIX if first else _REPEATS
    if width < _MIN_WIDTH or height < repeats:
        return None
    rows = ids[:, first:].unflatten(1, (height, width))
    row_index = torch.zeros(len(ids), height, dtype=torch.int32, device=ids.device)
    step = max(1, _PAIRS_AT_ONCE // ids.shape[1])
    for start in range(0, len(ids), step):
        part = rows[start : start + step]
        row_index[start : start + step, 1:] = (part[:, 1:] != part[:, :-1]).any(2).cumsum(1)
    count = int(row_index.max()) + 1
    if count * repeats > height or width < 2 * count:
        return None
    wanted = torch.arange(count, dtype=torch.int32, device=ids.device).expand(len(ids), -1)
    firsts = torch.searchsorted(row_index, wanted.contiguous())
    firsts = firsts.clamp_(max=height - 1)  # a query with fewer distinct rows has some twice
    distinct = rows.take_along_dim(firsts.unsqueeze(2), 1).flatten(1)
    return RepeatedRows(torch.cat([ids[:, :first], distinct], dim=1), row_index, width, first)
