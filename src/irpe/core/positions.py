"""Where the tokens of an attention are: queries and keys, each with tokens before them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from irpe.core.grid import Grid
from irpe.core.places import Coordinates, Points, PooledGrid, Subset
from irpe.errors import UserError, UserTypeError

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
    # What follows from these. Fields and not properties: of a constant a compiler reads
    # fields, but neither properties nor methods.
    sides: tuple[Places, Places] = field(init=False, repr=False, compare=False)
    """The places of queries and keys."""
    prefixes: tuple[int, int] = field(init=False, repr=False, compare=False)
    """The tokens without a position before the queries, and before the keys."""
    ndim: int = field(init=False, repr=False, compare=False)
    """The number of axes."""
    num_tokens: tuple[int, int] = field(init=False, repr=False, compare=False)
    """The number of queries and of keys, those without a position included."""
    batch: int | None = field(init=False, repr=False, compare=False)
    """The number of images if their positions differ."""
    grid: Grid | None = field(init=False, repr=False, compare=False)
    """The one grid that all tokens are on, at stride 1; `None` if there is none."""
    has_real_places: bool = field(init=False, repr=False, compare=False)
    """Whether some position is not an integer, or might not be."""
    constant: tuple[Any, ...] | None = field(init=False, repr=False, compare=False)
    """Plain values that `positions_of` makes an equal value of; `None` if there are tensors."""

    def __post_init__(self) -> None:
        queries = _as_places("queries", self.queries)
        keys = queries if self.keys is None else _as_places("keys", self.keys)
        prefixes = _counts(self.num_prefix_tokens)
        if queries.ndim != keys.ndim:
            raise UserError(
                f"queries on {queries.ndim} axes and keys on {keys.ndim}: an offset needs the same "
                "axes on both sides"
            )
        batches = [_batch_of(queries), _batch_of(keys)]
        if None not in batches and batches[0] != batches[1]:
            raise UserError(
                f"queries of {batches[0]} images and keys of {batches[1]}: give both for one batch"
            )
        plain = _plain_values(queries), _plain_values(keys)
        values = {
            "queries": queries,
            "keys": keys,
            "num_prefix_tokens": prefixes,
            "sides": (queries, keys),
            "prefixes": prefixes,
            "ndim": queries.ndim,
            "num_tokens": (
                prefixes[0] + queries.num_positions,
                prefixes[1] + keys.num_positions,
            ),
            "batch": batches[1] if batches[0] is None else batches[0],
            "grid": _grid_of(queries) if _grid_of(queries) == _grid_of(keys) else None,
            "has_real_places": _is_real(queries) or _is_real(keys),
            "constant": None if None in plain else (*plain, prefixes),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

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


def check_tokens(
    positions: Positions,
    q: Shaped[Tensor, "... query dim"],
    k: Shaped[Tensor, "... key dim"],
) -> None:
    """Raises an error unless there are as many queries and keys, and images, as positions."""
    sides = zip(("queries", "keys"), (q, k), positions.num_tokens, strict=True)
    for name, tokens, count in sides:
        if tokens.shape[-2] != count:
            raise UserError(
                f"{tokens.shape[-2]} {name}, but positions for {count}: {positions}; prefix tokens "
                "count too"
            )
    if positions.batch not in (None, q.shape[0]):
        raise UserError(
            f"positions of {positions.batch} images, but queries of {q.shape[0]}: make them for "
            "this batch"
        )


def axes_of(grid: "Grid | Sequence[int] | Positions") -> int:
    """Returns the number of axes of a grid or of positions."""
    return grid.ndim if isinstance(grid, Positions) else len(Grid.of(grid).shape)


def _as_places(name: str, value: Any) -> Places:
    if isinstance(value, Grid | PooledGrid | Subset | Points):
        return value
    if isinstance(value, Tensor):
        raise UserTypeError(
            f"{name} are a tensor: pass irpe.Points(coordinates), or irpe.Subset(grid, tokens) for "
            "indices on a grid"
        )
    return Grid.of(value)


def _counts(value: Any) -> tuple[int, int]:
    counts: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else (value, value)
    is_count = [isinstance(c, int) and not isinstance(c, bool) and c >= 0 for c in counts]
    if len(counts) != 2 or not all(is_count):
        raise UserError(
            f"num_prefix_tokens = {value!r} must be an integer of 0 or more, or two: of queries "
            "and of keys"
        )
    queries, keys = counts
    return queries, keys


def _batch_of(side: Places) -> int | None:
    return side.batch if isinstance(side, Subset | Points) else None


def _is_real(side: Places) -> bool:
    return isinstance(side, PooledGrid | Points) and side.is_real


def _plain_values(side: Places) -> tuple[Any, ...] | None:
    """Returns the kind of a side and its plain values; `None` if it holds tensors."""
    if isinstance(side, Grid):
        return "Grid", side.shape
    if isinstance(side, PooledGrid):
        return "PooledGrid", side.shape, side.stride, side.first
    if isinstance(side, Subset) and not isinstance(side.tokens, Tensor):
        return "Subset", side.grid.shape, side.tokens
    return None


_KINDS: dict[str, Any] = {"Grid": Grid, "PooledGrid": PooledGrid, "Subset": Subset}


@lru_cache(maxsize=256)
def positions_of(constant: tuple[Any, ...]) -> Positions:
    """Returns positions of their plain values, `Positions.constant`."""
    (query_kind, *queries), (key_kind, *keys), prefixes = constant
    return Positions(_KINDS[query_kind](*queries), _KINDS[key_kind](*keys), prefixes)


def _grid_of(side: Places) -> Grid | None:
    if isinstance(side, Subset):
        return side.grid
    return side if isinstance(side, Grid) else None


def _index_of(side: Places, count: int, has_prefix: int) -> Int[Tensor, "*batch tokens"]:
    index = side.index() if isinstance(side, Subset) else torch.arange(side.num_positions)
    prefix = index.new_zeros(*index.shape[:-1], count)
    return torch.cat([prefix, index + has_prefix], dim=-1)
