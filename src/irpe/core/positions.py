"""Where the tokens of an attention are: on grids, in their cells, on a part of one, or anywhere.

A position is in units of a patch: neighbours on a grid are 1.0 apart. Axes are in (row, column)
order, one for sequences, two for images, three for video; grids are flattened row-major.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from irpe.core.cached import traced_as_constant
from irpe.errors import UserError, UserTypeError

Coordinates = Shaped[Tensor, "*batch tokens axes"]  # integers, or float64


@dataclass(frozen=True)
class Grid:
    """The shape of a grid of tokens, axes in (row, column) order, flattened row-major.

    Args:
        shape: The number of positions along each axis, for example `(14, 14)`.

    Examples:
        >>> import irpe
        >>> irpe.Grid((7, 28)).num_positions
        196
    """

    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape or not all(_is_positive_int(size) for size in self.shape):
            raise UserError(
                f"grid {self.shape!r} is not a grid: give one positive integer per axis, "
                "for example (14, 14)"
            )

    @classmethod
    def of(cls, value: "Grid | Sequence[int]") -> "Grid":
        """Returns `value` as a grid; any sequence of axis lengths will do."""
        if isinstance(value, Grid):
            return value
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise UserTypeError(
                f"grid {value!r} is not a sequence of axis lengths: pass for example (14, 14)"
            )
        return cls(tuple(value))

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def num_positions(self) -> int:
        """The number of tokens on the grid."""
        return math.prod(self.shape)

    def coordinates(self) -> Int[Tensor, "positions axes"]:
        """Returns the position of every token, in the order in which the tokens are flattened."""
        axes = [torch.arange(size) for size in self.shape]
        return torch.stack(torch.meshgrid(axes, indexing="ij"), dim=-1).flatten(0, -2)

    def distinct_offsets(self) -> Int[Tensor, "*spans axes"]:
        """Returns every offset that occurs, once: -(size - 1) to size - 1 along each axis."""
        axes = [torch.arange(1 - size, size) for size in self.shape]
        return torch.stack(torch.meshgrid(axes, indexing="ij"), dim=-1)

    def __str__(self) -> str:
        return "x".join(map(str, self.shape))


@dataclass(frozen=True)
class PooledGrid:
    """A grid whose tokens each stand for a cell of several patches: pooled keys, for example.

    Cell j of an axis is at first + stride * j, by default in the centre of its patches.

    Args:
        shape: The number of cells along each axis.
        stride: The distance between neighbours in patches, for all axes or for each.
        first: The position of the first cell, for all axes or for each; `None` is the centre of
            `stride` patches, (stride - 1) / 2. A convolution with a padding begins at
            (kernel - 1) / 2 - padding.

    Examples:
        >>> import irpe
        >>> pooled = irpe.Positions(irpe.Grid((14, 14)), irpe.PooledGrid((7, 7), stride=2))
        >>> irpe.bucket_maps("product-bias-k", pooled)[0].ids.shape
        torch.Size([196, 49])
    """

    shape: tuple[int, ...]
    stride: float | tuple[float, ...]
    first: float | tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        shape = Grid.of(self.shape).shape
        stride = _by_axis("stride", self.stride, len(shape))
        if min(stride) <= 0:
            raise UserError(
                f"stride = {self.stride!r} must be greater than 0: the distance between "
                "neighbouring cells in patches"
            )
        centre = tuple((step - 1) / 2 for step in stride)
        first = centre if self.first is None else _by_axis("first", self.first, len(shape))
        for name, value in (("shape", shape), ("stride", stride), ("first", first)):
            object.__setattr__(self, name, value)

    @classmethod
    def after(cls, layer: Any, shape: Sequence[int]) -> "PooledGrid":
        """Returns what a convolution or a pooling layer makes of a grid: a cell for each window.

        Args:
            layer: The layer, with its kernel, stride and padding.
            shape: The shape of the grid.
        """
        shape = tuple(shape)
        kernel, stride, padding = (
            _by_axis(name, getattr(layer, name), len(shape))
            for name in ("kernel_size", "stride", "padding")
        )
        windows = zip(shape, kernel, stride, padding, strict=True)
        cells = tuple(int((n + 2 * p - k) // s) + 1 for n, k, s, p in windows)
        first = tuple((k - 1) / 2 - p for k, p in zip(kernel, padding, strict=True))
        return cls(cells, stride, first)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def num_positions(self) -> int:
        """The number of tokens."""
        return math.prod(self.shape)

    @property
    def line(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The stride and the position of the first cell, for each axis."""
        ndim = self.ndim
        return _by_axis("stride", self.stride, ndim), _by_axis("first", self.first, ndim)

    @property
    def is_real(self) -> bool:
        """Whether some position is not an integer."""
        stride, first = self.line
        return not all(map(float.is_integer, (*stride, *first)))

    def places(self) -> Coordinates:
        """Returns the position of every token; integers if all are."""
        stride, first = (torch.tensor(values, dtype=torch.float64) for values in self.line)
        places = Grid(self.shape).coordinates() * stride + first
        return places if self.is_real else places.long()

    def __str__(self) -> str:
        return f"{Grid(self.shape)} at stride {'x'.join(f'{step:g}' for step in self.line[0])}"


@dataclass(frozen=True, eq=False)
class Subset:
    """Some tokens of a grid in an order: those that a mask or patch dropout kept.

    Args:
        grid: The grid.
        tokens: Their indices on the grid, counted row-major; for all images, or as a tensor of
            (batch, tokens) for each.

    Examples:
        >>> import irpe
        >>> kept = irpe.Positions(irpe.Subset(irpe.Grid((14, 14)), (0, 5, 77)), num_prefix_tokens=1)
        >>> irpe.bucket_maps("product-bias-k", kept)[0].ids.shape
        torch.Size([4, 4])
    """

    grid: Grid
    tokens: tuple[int, ...] | Int[Tensor, "batch tokens"]

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", Grid.of(self.grid))
        tokens: object = self.tokens
        if isinstance(tokens, Tensor):
            _check_is_integer("tokens", tokens)
            if tokens.ndim not in (1, 2):
                raise UserError(
                    f"tokens of shape {tuple(tokens.shape)} are not indices on a grid: pass "
                    "(tokens,) for all images or (batch, tokens) for each"
                )
        elif isinstance(tokens, Sequence) and not isinstance(tokens, str):
            tokens = _to_tensor(tokens)
        else:
            raise UserTypeError(
                f"tokens {tokens!r} are not a sequence of indices on grid {self.grid}"
            )
        if not torch.compiler.is_compiling():
            _check_tokens(tokens, self.grid)
        kept = tokens if tokens.ndim == 2 else tuple(tokens.tolist())
        object.__setattr__(self, "tokens", kept)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.grid.ndim

    @property
    def num_positions(self) -> int:
        """The number of tokens of an image."""
        return self.index().shape[-1]

    @property
    def batch(self) -> int | None:
        """The number of images if they differ."""
        return len(self.tokens) if isinstance(self.tokens, Tensor) else None

    def index(self) -> Int[Tensor, "*batch tokens"]:
        """Returns the indices as a tensor."""
        return self.tokens if isinstance(self.tokens, Tensor) else torch.tensor(self.tokens)

    def places(self) -> Coordinates:
        """Returns the position of every token."""
        index = self.index()
        return self.grid.coordinates().to(index.device)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(self.tokens, Tensor) or not isinstance(other, Subset):
            return self is other
        return (self.grid, self.tokens) == (other.grid, other.tokens)

    def __hash__(self) -> int:
        return id(self) if isinstance(self.tokens, Tensor) else hash((self.grid, self.tokens))

    def __str__(self) -> str:
        return f"{self.num_positions} tokens of {self.grid}"


@dataclass(frozen=True, eq=False)
class Points:
    """Tokens at coordinates: points, patches of images of several sizes, boxes.

    Args:
        coordinates: (tokens, axes) for all images, or (batch, tokens, axes) for each; integers or
            real.
        is_token: False where an image has padding in the place of a token: (batch, tokens). No
            query attends to padding.
        scale: How many patches a unit of the coordinates is. With coordinates from 0 to 1 and
            scale 14, neighbours on a grid of 14 are 1.0 apart.

    Examples:
        >>> import irpe, torch
        >>> points = irpe.Positions(irpe.Points(torch.rand(96, 2), scale=14))
        >>> irpe.bucket_maps("euclidean-bias-k", points)[0].ids.shape
        torch.Size([96, 96])
    """

    coordinates: Coordinates
    is_token: Bool[Tensor, "batch tokens"] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        x: object = self.coordinates
        if not isinstance(x, Tensor) or x.dtype == torch.bool or x.is_complex():
            raise UserTypeError(
                f"coordinates {getattr(x, 'dtype', x)!r} must be a tensor of integers or reals"
            )
        if x.ndim not in (2, 3) or 0 in x.shape[-2:]:
            raise UserError(
                f"coordinates of shape {tuple(x.shape)} are not (tokens, axes) or (batch, tokens, "
                "axes), with at least one of each"
            )
        _check_scale(self.scale)
        if self.is_token is not None:
            _check_padding(self.is_token, x)
        if not torch.compiler.is_compiling():
            _check_finite(x, self.is_token)

    @classmethod
    def of_grids(cls, shapes: Int[Tensor, "batch axes"], num_tokens: int) -> "Points":
        """Returns the tokens of images with a grid each, row-major, then padding.

        Args:
            shapes: The shape of the grid of each image.
            num_tokens: The tokens of an image with its padding.
        """
        _check_is_integer("shapes", shapes)
        largest = int(shapes.prod(-1).max())
        if shapes.ndim != 2 or int(shapes.min()) < 1 or largest > num_tokens:
            raise UserError(
                f"grids {shapes.tolist()} do not fit images of {num_tokens} tokens: give one "
                "positive integer per axis for each image, with a product of at most that"
            )
        rest = torch.arange(num_tokens, device=shapes.device).expand(len(shapes), -1)
        is_token = rest < shapes.prod(-1, keepdim=True)
        axes: list[Tensor] = []
        for size in reversed(shapes.unbind(-1)):
            axes.append(rest % size[:, None])
            rest = rest // size[:, None]
        return cls(torch.stack(axes[::-1], dim=-1), is_token)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.coordinates.shape[-1]

    @property
    def num_positions(self) -> int:
        """The number of tokens of an image, its padding included."""
        return self.coordinates.shape[-2]

    @property
    def batch(self) -> int | None:
        """The number of images if they differ."""
        return len(self.coordinates) if self.coordinates.ndim == 3 else None

    @property
    def is_real(self) -> bool:
        """Whether positions are real numbers, not integers."""
        return self.scale != 1 or self.coordinates.is_floating_point()

    def places(self) -> Coordinates:
        """Returns the position of every token; those of padding mean nothing."""
        places = self.coordinates.detach()
        if self.is_token is not None:
            places = places.masked_fill(~self.is_token[..., None], 0)
        return places.double() * self.scale if self.is_real else places.long()

    def __str__(self) -> str:
        return f"{self.num_positions} points"


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


def grid_shape(value: Grid | Sequence[int]) -> tuple[int, ...]:
    """Returns the axis lengths of a grid; sizes that a compiler traces become plain integers."""
    if isinstance(value, Grid):
        return value.shape
    kinds = set(map(type, value)) if isinstance(value, Sequence) else {str}
    if kinds & {str, float, bool}:  # the last two are equal to integers as keys of caches
        return Grid.of(value).shape  # says what is wrong
    return tuple([operator.index(size) for size in value])


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


def _grid_of(side: Places) -> Grid | None:
    if isinstance(side, Subset):
        return side.grid
    return side if isinstance(side, Grid) else None


def _index_of(side: Places, count: int, has_prefix: int) -> Int[Tensor, "*batch tokens"]:
    index = side.index() if isinstance(side, Subset) else torch.arange(side.num_positions)
    prefix = index.new_zeros(*index.shape[:-1], count)
    return torch.cat([prefix, index + has_prefix], dim=-1)


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _by_axis(name: str, value: Any, ndim: int) -> tuple[float, ...]:
    """Returns a number for each axis, of one for all or one for each."""
    values: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else (value,) * ndim
    is_real = [isinstance(v, int | float) and not isinstance(v, bool) for v in values]
    if len(values) != ndim or not all(is_real) or not all(map(math.isfinite, values)):
        raise UserError(
            f"{name} = {value!r} must be a finite number, or one for each of {ndim} axes"
        )
    return tuple(float(v) for v in values)


def _to_tensor(tokens: Sequence[int]) -> Tensor:
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
        raise UserTypeError(
            f"tokens {list(tokens)!r} are not all integers: pass indices on the grid"
        )
    return torch.tensor(tokens, dtype=torch.long)


def _check_is_integer(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise UserTypeError(f"{name} are {tensor.dtype}: pass integers")


def _check_tokens(tokens: Tensor, grid: Grid) -> None:
    """Raises an error for an index that is not on the grid, or there twice."""
    last = grid.num_positions - 1
    if tokens.numel() == 0:
        raise UserError(f"tokens are empty: pass at least one index from 0 to {last}")
    outside = tokens[(tokens < 0) | (tokens > last)]
    if outside.numel():
        raise UserError(
            f"token {int(outside[0])} is not on grid {grid}: its tokens are 0 to {last}, counted "
            "row-major, without prefix tokens"
        )
    ordered = tokens.sort(dim=-1).values
    repeated = ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]]
    if repeated.numel():
        raise UserError(
            f"token {int(repeated[0])} of grid {grid} occurs twice: each token of a subset occurs "
            "once; tokens that share a position are Points"
        )


def _check_scale(scale: float) -> None:
    is_real = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not is_real or not 0 < scale < math.inf:
        raise UserError(
            f"scale = {scale!r} must be a finite number greater than 0: the patches in a unit of "
            "the coordinates"
        )


def _check_padding(is_token: Tensor, coordinates: Tensor) -> None:
    shape = tuple(coordinates.shape[:-1])
    if coordinates.ndim != 3 or is_token.dtype != torch.bool or tuple(is_token.shape) != shape:
        raise UserError(
            f"is_token of shape {tuple(is_token.shape)}, {is_token.dtype} does not fit coordinates "
            f"of shape {tuple(coordinates.shape)}: it is boolean, (batch, tokens), False where "
            "there is padding"
        )


def _check_finite(coordinates: Tensor, is_token: Tensor | None) -> None:
    """Raises an error for a token without a position, or an image without a token."""
    if is_token is not None and not bool(is_token.any(-1).all()):
        image = int((~is_token.any(-1)).nonzero()[0])
        raise UserError(f"image {image} has no tokens, padding alone: leave it out of the batch")
    if not coordinates.is_floating_point():
        return
    is_lost = ~coordinates.isfinite().all(-1)
    is_lost = is_lost if is_token is None else is_lost & is_token
    if bool(is_lost.any()):
        where = is_lost.nonzero()[0].tolist()
        raise UserError(
            f"coordinates {coordinates[tuple(where)].tolist()} of token {where} are not finite: "
            "every token needs a position; mark padding with is_token"
        )
