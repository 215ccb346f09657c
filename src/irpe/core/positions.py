"""Where the tokens of an attention are: queries and keys, each with tokens before them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from irpe.core.grid import Grid
from irpe.core.places import Coordinates, Points, PooledGrid, Subset

Places = Grid | PooledGrid | Subset | Points


@dataclass(frozen=True)
class Positions:
    """Where the queries and the keys of an attention are; checked when it is made.

    Queries and keys on one whole grid need no `Positions`: the grid alone is the short form. Two
    equal values have equal bucket maps, and these are made once, unless a tensor is in them: then
    they live as long as the value does.

    Args:
        queries: A grid, cells of one, some tokens of one, or points.
        keys: Likewise; `None` means that the queries are the keys too.
        num_prefix_tokens: How many tokens without a position (class, registers) stand before the
            others; two numbers where queries and keys have different ones.

    Examples:
        >>> import irpe
        >>> kept = irpe.Subset(irpe.Grid((2, 3)), (0, 4, 5))
        >>> (buckets,) = irpe.bucket_maps("product-bias-k", irpe.Positions(irpe.Grid((2, 3)), kept))
        >>> buckets.ids.shape
        torch.Size([6, 3])
    """

    queries: Places
    keys: Places | None = None
    num_prefix_tokens: int | tuple[int, int] = 0

    def __post_init__(self) -> None:
        queries = _as_places("queries", self.queries)
        keys = queries if self.keys is None else _as_places("keys", self.keys)
        object.__setattr__(self, "queries", queries)
        object.__setattr__(self, "keys", keys)
        object.__setattr__(self, "num_prefix_tokens", _counts(self.num_prefix_tokens))
        if queries.ndim != keys.ndim:
            raise ValueError(
                f"queries on {queries.ndim} axes and keys on {keys.ndim}: an offset needs the same "
                "axes on both sides"
            )
        sizes = {size for size in map(_batch_of, (queries, keys)) if size is not None}
        if len(sizes) > 1:
            raise ValueError(
                f"queries of {_batch_of(queries)} images and keys of {_batch_of(keys)}: give both "
                "for one batch"
            )

    @property
    def sides(self) -> tuple[Places, Places]:
        """The places of queries and keys."""
        assert self.keys is not None
        return self.queries, self.keys

    @property
    def prefixes(self) -> tuple[int, int]:
        """The tokens without a position before the queries, and before the keys."""
        assert isinstance(self.num_prefix_tokens, tuple)
        return self.num_prefix_tokens

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.queries.ndim

    @property
    def num_tokens(self) -> tuple[int, int]:
        """The number of queries and of keys, those without a position included."""
        queries, keys = (
            count + side.num_positions
            for count, side in zip(self.prefixes, self.sides, strict=True)
        )
        return queries, keys

    @property
    def batch(self) -> int | None:
        """The number of images if their positions differ."""
        return next((size for size in map(_batch_of, self.sides) if size is not None), None)

    @property
    def is_constant(self) -> bool:
        """Whether the value holds no tensors, so that equal values are one key of a cache."""
        return self.batch is None and not any(isinstance(side, Points) for side in self.sides)

    @property
    def grid(self) -> Grid | None:
        """The one grid that all tokens are on, at stride 1; `None` if there is none."""
        grids = {_grid_of(side) for side in self.sides}
        return grids.pop() if len(grids) == 1 else None

    @property
    def has_real_places(self) -> bool:
        """Whether some position is not an integer, or might not be."""
        return any(side.is_real for side in self.sides if isinstance(side, PooledGrid | Points))

    def places(self) -> tuple[Coordinates, Coordinates]:
        """Returns the positions of queries and keys, without prefix tokens."""
        queries, keys = (
            side.coordinates() if isinstance(side, Grid) else side.places() for side in self.sides
        )
        return queries, keys

    def index_on_grid(self) -> tuple[Int[Tensor, "*batch query"], Int[Tensor, "*batch key"]]:
        """Returns which tokens of the whole grid queries and keys are, counted after one prefix.

        Token 0 stands for prefix tokens, which all count alike; only where `grid` is not `None`.
        """
        has_prefix = int(any(self.prefixes))
        queries, keys = (
            _index_of(side, count, has_prefix)
            for side, count in zip(self.sides, self.prefixes, strict=True)
        )
        return queries, keys

    def check_tokens(
        self, q: Shaped[Tensor, "... query dim"], k: Shaped[Tensor, "... key dim"]
    ) -> None:
        """Raises an error unless there are as many queries and keys, and images, as positions."""
        for name, tokens, count in zip(("queries", "keys"), (q, k), self.num_tokens, strict=True):
            if tokens.shape[-2] != count:
                raise ValueError(
                    f"{tokens.shape[-2]} {name}, but positions for {count}: {self}; prefix tokens "
                    "count too"
                )
        if self.batch not in (None, q.shape[0]):
            raise ValueError(
                f"positions of {self.batch} images, but queries of {q.shape[0]}: make them for "
                "this batch"
            )

    def padding_mask(self) -> Bool[Tensor, "batch 1 1 key"] | None:
        """Returns a mask for attention, False for keys that are padding; `None` without padding."""
        _, keys = self.sides
        if not isinstance(keys, Points) or keys.is_token is None:
            return None
        prefix = keys.is_token.new_ones(len(keys.is_token), self.prefixes[1])
        return torch.cat([prefix, keys.is_token], dim=1)[:, None, None]

    def __str__(self) -> str:
        queries, keys = (
            f"{side}+{count}" if count else str(side)
            for side, count in zip(self.sides, self.prefixes, strict=True)
        )
        return queries if queries == keys else f"{queries} / {keys}"


def axes_of(grid: "Grid | Sequence[int] | Positions") -> int:
    """Returns the number of axes of a grid or of positions."""
    return grid.ndim if isinstance(grid, Positions) else len(Grid.of(grid).shape)


def _as_places(name: str, value: Any) -> Places:
    if isinstance(value, Grid | PooledGrid | Subset | Points):
        return value
    if isinstance(value, Tensor):
        raise TypeError(
            f"{name} are a tensor: pass irpe.Points(coordinates), or irpe.Subset(grid, tokens) for "
            "indices on a grid"
        )
    return Grid.of(value)


def _counts(value: Any) -> tuple[int, int]:
    counts: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else (value, value)
    is_count = [isinstance(c, int) and not isinstance(c, bool) and c >= 0 for c in counts]
    if len(counts) != 2 or not all(is_count):
        raise ValueError(
            f"num_prefix_tokens = {value!r} must be an integer of 0 or more, or two: of queries "
            "and of keys"
        )
    queries, keys = counts
    return queries, keys


def _batch_of(side: Places) -> int | None:
    return side.batch if isinstance(side, Subset | Points) else None


def _grid_of(side: Places) -> Grid | None:
    if isinstance(side, Subset):
        return side.grid
    return side if isinstance(side, Grid) else None


def _index_of(side: Places, count: int, has_prefix: int) -> Int[Tensor, "*batch tokens"]:
    index = side.index() if isinstance(side, Subset) else torch.arange(side.num_positions)
    prefix = index.new_zeros(*index.shape[:-1], count)
    return torch.cat([prefix, index + has_prefix], dim=-1)
