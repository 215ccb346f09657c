"""How the buckets of a query's keys repeat over the grid: what is looked up once serves many keys.

A layout holds the ids to look up for each query, in fewer numbers than there are keys where it can,
and knows which keys each of them is for. Prefix tokens stand before the grid.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from irpe.ops.shapes import Ids, Pairs

Narrow = Float[Tensor, "batch heads query narrow"]


class Pairwise(NamedTuple):
    """Nothing is known: an id for each key."""

    ids: Ids

    def at(self, queries: slice) -> "Pairwise":
        """Returns the layout of some queries."""
        return Pairwise(self.ids[queries])

    def spread(self, narrow: Narrow) -> Pairs:
        """Returns a number for each key."""
        return narrow

    def add(self, narrow: Narrow, pairs: Pairs) -> None:
        """Adds to the number of each key the one that is looked up for it, in place."""
        pairs += narrow

    def collect(self, pairs: Pairs) -> Narrow:
        """Returns the sums over the keys of each id: the adjoint of `spread`."""
        return pairs


class Axes(NamedTuple):
    """The bucket depends on one axis of the grid: an id for each of its coordinates.

    What several axes give is added up, each with rows of its own in one table.

    Args:
        ids: For each axis in turn the ids, and that of a prefix token if there is one.
        grid: The shape of the grid.
        numbers: Which axes.
        num_prefix_tokens: How many keys stand before the grid.
    """

    ids: Int[Tensor, "query coordinate"]
    grid: tuple[int, ...]
    numbers: tuple[int, ...]
    num_prefix_tokens: int

    @classmethod
    def of(cls, ids: dict[int, Ids], rows: Sequence[int], grid: tuple[int, ...]) -> "Axes":
        """Returns the layout.

        Args:
            ids: For each axis, an id for each pair.
            rows: How many rows of the table each axis has.
            grid: The shape of the grid.
        """
        first = next(iter(ids.values())).shape[1] - math.prod(grid)
        parts, start = [], 0
        for (number, of_pairs), count in zip(ids.items(), rows, strict=True):
            stride = math.prod(grid[number + 1 :])
            parts.append(of_pairs[:, first : first + grid[number] * stride : stride].int() + start)
            if first:
                parts.append(of_pairs[:, :1].int() + start)
            start += count
        return cls(torch.cat(parts, dim=1), grid, tuple(ids), first)

    def at(self, queries: slice) -> "Axes":
        """Returns the layout of some queries."""
        return self._replace(ids=self.ids[queries])

    def spread(self, narrow: Narrow) -> Pairs:
        """Returns a number for each key."""
        num_keys = self.num_prefix_tokens + math.prod(self.grid)
        pairs = narrow.new_empty(*narrow.shape[:-1], num_keys)
        for whole, (part, *others) in self._views(pairs, narrow):
            if not others:
                whole.copy_(part)
                continue
            torch.add(part.expand(whole.shape), others[0], out=whole)  # one pass for two axes
            for other in others[1:]:
                whole += other
        return pairs

    def add(self, narrow: Narrow, pairs: Pairs) -> None:
        """Adds to the number of each key the one that is looked up for it, in place."""
        for whole, parts in self._views(pairs, narrow):
            for part in parts:
                whole += part

    def _views(self, pairs: Pairs, narrow: Narrow) -> list[tuple[Tensor, list[Tensor]]]:
        """Returns the patches and the prefix tokens, each beside what is broadcast to them."""
        first = self.num_prefix_tokens
        parts = narrow.split([self.grid[number] + (first > 0) for number in self.numbers], dim=-1)
        to_patches = [
            part[..., : self.grid[number]].unflatten(
                -1, [size if axis == number else 1 for axis, size in enumerate(self.grid)]
            )
            for number, part in zip(self.numbers, parts, strict=True)
        ]
        views = [(pairs[..., first:].unflatten(-1, self.grid), to_patches)]
        to_prefix = [part[..., -1:] for part in parts]
        return [*views, (pairs[..., :first], to_prefix)] if first else views

    def collect(self, pairs: Pairs) -> Narrow:
        """Returns the sums over the keys of each id: the adjoint of `spread`."""
        first, ndim = self.num_prefix_tokens, len(self.grid)
        patches = pairs[..., first:].unflatten(-1, self.grid)
        prefix = [pairs[..., :first].sum(-1, keepdim=True)] if first else []
        sums: list[Tensor] = []
        for number in self.numbers:
            others = [axis - ndim for axis in range(ndim) if axis != number]
            sums += [patches.sum(others) if others else patches, *prefix]
        return torch.cat(sums, dim=-1)


class Rows(NamedTuple):
    """The keys of one row of the grid have the buckets of another: ids for the distinct rows alone.

    Args:
        ids: The ids of prefix tokens, then those of the distinct rows, one row after the other.
        numbers: Which of the distinct rows each row of the grid is.
        width: The keys in a row.
        num_prefix_tokens: How many keys stand before the grid.
    """

    ids: Int[Tensor, "query narrow"]
    numbers: Int[Tensor, "query row"]
    width: int
    num_prefix_tokens: int

    def at(self, queries: slice) -> "Rows":
        """Returns the layout of some queries."""
        return self._replace(ids=self.ids[queries], numbers=self.numbers[queries])

    def spread(self, narrow: Narrow) -> Pairs:
        """Returns a number for each key."""
        rows = narrow[..., self.num_prefix_tokens :].unflatten(-1, (-1, self.width))
        *batch, distinct, width = rows.shape
        starts = torch.arange(0, math.prod(batch) * distinct, distinct, device=narrow.device)
        places = (starts.view(*batch, 1) + self.numbers).flatten()
        patches = rows.reshape(-1, width).index_select(0, places).view(*batch, -1)
        if not self.num_prefix_tokens:
            return patches
        return torch.cat([narrow[..., : self.num_prefix_tokens], patches], dim=-1)

    def add(self, narrow: Narrow, pairs: Pairs) -> None:
        """Adds to the number of each key the one that is looked up for it, in place."""
        pairs += self.spread(narrow)

    def collect(self, pairs: Pairs) -> Narrow:
        """Returns the sums over the keys of each id: the adjoint of `spread`."""
        first = self.num_prefix_tokens
        distinct = (self.ids.shape[1] - first) // self.width
        is_of = self.numbers.unsqueeze(1) == torch.arange(distinct, device=pairs.device)[:, None]
        rows = pairs[..., first:].unflatten(-1, (-1, self.width))
        sums = (is_of.to(pairs.dtype) @ rows).flatten(-2)
        return torch.cat([pairs[..., :first], sums], dim=-1) if first else sums


Layout = Pairwise | Axes | Rows
