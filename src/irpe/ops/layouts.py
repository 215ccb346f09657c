"""How the buckets of a query's keys repeat over the grid: what is looked up once serves many keys.

A layout holds the ids to look up for each query, in fewer numbers than there are keys where it can,
and knows which keys each of them is for. Prefix tokens stand before the grid.
"""

import math
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


class Axis(NamedTuple):
    """The bucket depends on one axis of the grid: an id for each of its coordinates.

    Args:
        ids: The ids, and that of a prefix token if there is one.
        grid: The shape of the grid.
        number: Which axis.
        num_prefix_tokens: How many keys stand before the grid.
    """

    ids: Int[Tensor, "query coordinate"]
    grid: tuple[int, ...]
    number: int
    num_prefix_tokens: int

    @classmethod
    def of(cls, ids: Ids, grid: tuple[int, ...], number: int) -> "Axis":
        """Returns the layout, given an id for each key."""
        first, size = ids.shape[1] - math.prod(grid), grid[number]
        stride = math.prod(grid[number + 1 :])
        keys = ids[:, first : first + size * stride : stride]
        narrow = torch.cat([keys, ids[:, :1]], dim=1) if first else keys.contiguous()
        return cls(narrow, grid, number, first)

    def at(self, queries: slice) -> "Axis":
        """Returns the layout of some queries."""
        return self._replace(ids=self.ids[queries])

    def spread(self, narrow: Narrow) -> Pairs:
        """Returns a number for each key."""
        num_keys = self.num_prefix_tokens + math.prod(self.grid)
        pairs = narrow.new_empty(*narrow.shape[:-1], num_keys)
        for whole, part in self._views(pairs, narrow):
            whole.copy_(part)
        return pairs

    def add(self, narrow: Narrow, pairs: Pairs) -> None:
        """Adds to the number of each key the one that is looked up for it, in place."""
        for whole, part in self._views(pairs, narrow):
            whole += part

    def _views(self, pairs: Pairs, narrow: Narrow) -> list[tuple[Tensor, Tensor]]:
        """Returns the patches and the prefix tokens, each beside what is broadcast to them."""
        first, size = self.num_prefix_tokens, self.grid[self.number]
        shape = [size if axis == self.number else 1 for axis in range(len(self.grid))]
        patches = pairs[..., first:].unflatten(-1, self.grid)
        views = [(patches, narrow[..., :size].unflatten(-1, shape))]
        return [*views, (pairs[..., :first], narrow[..., size:])] if first else views

    def collect(self, pairs: Pairs) -> Narrow:
        """Returns the sums over the keys of each id: the adjoint of `spread`."""
        first = self.num_prefix_tokens
        others = [axis - len(self.grid) for axis in range(len(self.grid)) if axis != self.number]
        patches = pairs[..., first:].unflatten(-1, self.grid)
        sums = patches.sum(others) if others else patches
        if not first:
            return sums
        return torch.cat([sums, pairs[..., :first].sum(-1, keepdim=True)], dim=-1)


class Rows(NamedTuple):
    """The keys of one row of the grid have the buckets of another: ids for the distinct rows alone.

    Args:
        ids: The ids of the distinct rows, one row after the other, and those of prefix tokens.
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


Layout = Pairwise | Axis | Rows
