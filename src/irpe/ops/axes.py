"""Maps that depend on one axis of the grid: one number for each coordinate serves all its keys."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from irpe.ops.shapes import Ids, Pairs


class Axis(NamedTuple):
    """The axis of the grid that a map depends on; keys before the grid are prefix tokens.

    Args:
        grid: The shape of the grid.
        number: Which axis.
        num_prefix_tokens: How many keys stand before the grid.
    """

    grid: tuple[int, ...]
    number: int
    num_prefix_tokens: int

    def narrow_ids(self, ids: Ids) -> Ids:
        """Returns the ids of one key for each coordinate, and of a prefix token if there is one."""
        first, size = self.num_prefix_tokens, self.grid[self.number]
        stride = math.prod(self.grid[self.number + 1 :])
        keys = ids[:, first : first + size * stride : stride]
        return torch.cat([keys, ids[:, :1]], dim=1) if first else keys.contiguous()

    def spread(self, narrow: Pairs) -> Pairs:
        """Returns a number for each key, given one for each coordinate."""
        num_keys = self.num_prefix_tokens + math.prod(self.grid)
        pairs = narrow.new_empty(*narrow.shape[:-1], num_keys)
        for whole, part in self._views(pairs, narrow):
            whole.copy_(part)
        return pairs

    def add(self, narrow: Pairs, pairs: Pairs) -> None:
        """Adds to the number of each key the one of its coordinate, in place."""
        for whole, part in self._views(pairs, narrow):
            whole += part

    def _views(self, pairs: Pairs, narrow: Pairs) -> list[tuple[Tensor, Tensor]]:
        """Returns the patches and the prefix tokens, each beside what is broadcast to them."""
        first, size = self.num_prefix_tokens, self.grid[self.number]
        shape = [size if axis == self.number else 1 for axis in range(len(self.grid))]
        patches = pairs[..., first:].unflatten(-1, self.grid)
        views = [(patches, narrow[..., :size].unflatten(-1, shape))]
        return [*views, (pairs[..., :first], narrow[..., size:])] if first else views

    def collect(self, pairs: Pairs) -> Pairs:
        """Returns the sum over the keys of each coordinate: the adjoint of `spread`."""
        first = self.num_prefix_tokens
        others = [axis - len(self.grid) for axis in range(len(self.grid)) if axis != self.number]
        patches = pairs[..., first:].unflatten(-1, self.grid)
        sums = patches.sum(others) if others else patches
        if not first:
            return sums
        return torch.cat([sums, pairs[..., :first].sum(-1, keepdim=True)], dim=-1)
