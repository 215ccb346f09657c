"""Grids of tokens, axes in (row, column) order, flattened row-major.

A position is in units of a patch: neighbours on a grid are 1.0 apart.
"""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from irpe.errors import UserError, UserTypeError

Coordinates = Shaped[Tensor, "*batch tokens axes"]  # integers, or float64


@dataclass(frozen=True)
class Grid:
    """The shape of a grid of tokens: one axis for sequences, two for images, three for video.

    Args:
        shape: The number of positions along each axis, for example `(14, 14)`.

    Examples:
        >>> import irpe
        >>> irpe.Grid((7, 28)).num_positions
        196
    """

    shape: tuple[int, ...]
    batch = None
    is_real = False

    def __post_init__(self) -> None:
        sizes = self.shape
        is_size = [isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes]
        if not all(is_size) or not is_size:
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
    batch = None

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
        return self.stride, self.first  # pyright: ignore[reportReturnType]

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


def grid_shape(value: Grid | Sequence[int]) -> tuple[int, ...]:
    """Returns the axis lengths of a grid; sizes that a compiler traces become plain integers."""
    if isinstance(value, Grid):
        return value.shape
    kinds = set(map(type, value)) if isinstance(value, Sequence) else {str}
    if kinds & {str, float, bool}:  # the last two are equal to integers as keys of caches
        return Grid.of(value).shape  # says what is wrong
    return tuple([operator.index(size) for size in value])


def _by_axis(name: str, value: Any, ndim: int) -> tuple[float, ...]:
    """Returns a number for each axis, of one for all or one for each."""
    values: tuple[Any, ...] = tuple(value) if isinstance(value, Sequence) else (value,) * ndim
    is_real = [isinstance(v, int | float) and not isinstance(v, bool) for v in values]
    if len(values) != ndim or not all(is_real) or not all(map(math.isfinite, values)):
        raise UserError(
            f"{name} = {value!r} must be a finite number, or one for each of {ndim} axes"
        )
    return tuple(float(v) for v in values)
