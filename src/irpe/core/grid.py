"""Grids of positions: one axis for sequences, two for images, three for video."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from irpe.errors import UserError, UserTypeError


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


def grid_shape(value: "Grid | Sequence[int]") -> tuple[int, ...]:
    """Returns the axis lengths of a grid; sizes that a compiler traces become plain integers."""
    if isinstance(value, Grid):
        return value.shape
    if not isinstance(value, Sequence) or isinstance(value, str):
        return Grid.of(value).shape  # says what is wrong
    if any(isinstance(size, float | bool) for size in value):  # equal to integers as keys of caches
        return Grid.of(value).shape  # says what is wrong
    return tuple(operator.index(size) for size in value)


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
