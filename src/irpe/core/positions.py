"""Where the queries and the keys of an attention are, in one value."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from irpe.core.cached import traced_as_constant
from irpe.core.grid import Coordinates, Grid, PooledGrid, grid_shape
from irpe.core.token_sets import Points, Subset
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
        batches = [count for count in (queries.batch, keys.batch) if count is not None]
        if batches and batches[0] != batches[-1]:
            raise UserError(
                f"queries of {queries.batch} images and keys of {keys.batch}: give both for one "
                "batch"
            )
        plain = _plain_values(queries), _plain_values(keys)
        values = {
            "queries": queries,
            "keys": keys,
            "num_prefix_tokens": prefixes,
            "sides": (queries, keys),
            "prefixes": prefixes,
            "ndim": queries.ndim,
            "num_tokens": (prefixes[0] + queries.num_positions, prefixes[1] + keys.num_positions),
            "batch": batches[0] if batches else None,
            "grid": _grid_of(queries) if _grid_of(queries) == _grid_of(keys) else None,
            "has_real_places": queries.is_real or keys.is_real,
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

    def mask_padding(self, attn_mask: Shaped[Tensor, "..."] | None) -> Shaped[Tensor, "..."] | None:
        """Returns a mask of attention that leaves out keys that are padding too, if there are any.

        Args:
            attn_mask: True where a key takes part, or scores to add; `None` for all keys.
        """
        keys = self.sides[1]
        if not isinstance(keys, Points) or keys.is_token is None:
            return attn_mask
        prefix = keys.is_token.new_ones(len(keys.is_token), self.prefixes[1])
        is_key = torch.cat([prefix, keys.is_token], dim=1)[:, None, None]  # batch 1 1 key
        if attn_mask is None:
            return is_key
        if attn_mask.dtype == torch.bool:
            return attn_mask & is_key
        return torch.where(is_key, attn_mask, float("-inf"))

    def __str__(self) -> str:
        queries, keys = (
            f"{side}+{count}" if count else str(side)
            for side, count in zip(self.sides, self.prefixes, strict=True)
        )
        return queries if queries == keys else f"{queries} / {keys}"


Sample = Float[Tensor, " numbers"]  # in [-1, 1]: one for all axes, then two for each


@dataclass(frozen=True, eq=False)
class AugmentedGrid:
    """A grid, or positions, with the random numbers of one forward pass in training.

    All attentions of a pass are given the same value. `irpe.equip` sees to that; a model of your
    own makes one with `of` for each pass. Encodings without an augmentation, and those in eval
    mode, use the grid alone.

    Args:
        where: The shape of the grid, or `irpe.Positions`.
        sample: Numbers in [-1, 1]: one for all axes, then two for each.

    Examples:
        >>> import irpe, torch
        >>> attention = irpe.RPEAttention(64, num_heads=2, spec="rope-axial+rescale2")
        >>> grid = irpe.AugmentedGrid.of((7, 14))
        >>> attention(torch.randn(8, 98, 64), grid).shape
        torch.Size([8, 98, 64])
    """

    where: tuple[int, ...] | Positions
    sample: Sample

    @classmethod
    def of(
        cls,
        where: Grid | tuple[int, ...] | Positions,
        device: torch.device | str | None = None,
        generator: torch.Generator | None = None,
    ) -> "AugmentedGrid":
        """Returns a grid with new random numbers.

        Args:
            where: The grid, or positions.
            device: Where the numbers are made: that of the tokens.
            generator: Makes the numbers; `None` for the device's own, which seeds set.
        """
        if isinstance(where, Grid):
            where = where.shape
        count = 1 + 2 * axes_of(where)
        numbers = torch.rand(count, device=device, generator=generator)
        return cls(where, 2 * numbers - 1)

    def __str__(self) -> str:
        return f"{self.where}, augmented"


Where = Grid | Sequence[int] | Positions | AugmentedGrid  # a grid is the short form of positions


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


def axes_of(where: Where) -> int:
    """Returns the number of axes of a grid or of positions."""
    where = where.where if isinstance(where, AugmentedGrid) else where
    return where.ndim if isinstance(where, Positions) else len(grid_shape(where))


def pooled_positions(
    queries: "Grid | PooledGrid", keys: "Grid | PooledGrid", num_prefix_tokens: int = 0
) -> Positions:
    """Returns the positions of queries and keys on one map, some of them pooled.

    Neighbours of the finer side are 1.0 apart.

    Args:
        queries: The map, or the cells that queries stand for.
        keys: Likewise.
        num_prefix_tokens: The tokens before both.
    """
    return _pooled_positions(_plain_values(queries), _plain_values(keys), num_prefix_tokens)


@traced_as_constant
@lru_cache(maxsize=256)
def _pooled_positions(
    queries: tuple[Any, ...], keys: tuple[Any, ...], num_prefix_tokens: int
) -> Positions:
    """Takes plain values: the compiler makes no constants of others."""
    sides = [
        (shape, *line) if line else (shape, (1.0,) * len(shape), (0.0,) * len(shape))
        for _, shape, *line in (queries, keys)
    ]
    unit = [min(steps) for steps in zip(sides[0][1], sides[1][1], strict=True)]
    places: list[Grid | PooledGrid] = []
    for shape, *line in sides:
        stride, first = (tuple(x / u for x, u in zip(part, unit, strict=True)) for part in line)
        is_grid = set(stride) == {1.0} and set(first) == {0.0}
        places.append(Grid(shape) if is_grid else PooledGrid(shape, stride, first))
    return Positions(places[0], places[1], num_prefix_tokens)


_KINDS: dict[str, Any] = {"Grid": Grid, "PooledGrid": PooledGrid, "Subset": Subset}


@lru_cache(maxsize=256)
def positions_of(constant: tuple[Any, ...]) -> Positions:
    """Returns positions of their plain values, `Positions.constant`."""
    (query_kind, *queries), (key_kind, *keys), prefixes = constant
    return Positions(_KINDS[query_kind](*queries), _KINDS[key_kind](*keys), prefixes)


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


def _plain_values(side: Places) -> tuple[Any, ...] | None:
    """Returns the kind of a side and its plain values; `None` if it holds tensors."""
    if isinstance(side, Grid):
        return "Grid", side.shape
    if isinstance(side, PooledGrid):
        return "PooledGrid", side.shape, side.stride, side.first
    if isinstance(side, Subset) and not isinstance(side.tokens, Tensor):
        return "Subset", side.grid.shape, side.tokens
    return None


def _grid_of(side: Places) -> Grid | None:
    if isinstance(side, Subset):
        return side.grid
    return side if isinstance(side, Grid) else None


def _index_of(side: Places, count: int, has_prefix: int) -> Int[Tensor, "*batch tokens"]:
    index = side.index() if isinstance(side, Subset) else torch.arange(side.num_positions)
    prefix = index.new_zeros(*index.shape[:-1], count)
    return torch.cat([prefix, index + has_prefix], dim=-1)
