"""Sines and cosines of each axis: of positions (Eq. 4's fixed choice) or of offsets (Eq. 10)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from irpe.core.cached import cached_constant
from irpe.core.grid import Grid
from irpe.errors import UserError

_LONGEST_WAVE = 10000.0


def sinusoid(grid: Grid | Sequence[int], dim: int) -> Float[Tensor, "positions dim"]:
    """Returns an encoding of every position: an equal share of the dimensions for each axis.

    Args:
        grid: The shape of the grid.
        dim: The dimension of a token; a multiple of twice the number of axes.
    """
    return sinusoid_of(Grid.of(grid).coordinates(), dim).float()


def sinusoid_of(
    coordinates: Shaped[Tensor, "positions axes"], dim: int
) -> Float[Tensor, "positions dim"]:
    """Returns the sines, then the cosines, of each axis in turn, in float64; signs count.

    Args:
        coordinates: Positions, or offsets between positions.
        dim: The numbers for each; a multiple of twice the number of axes.
    """
    axes = coordinates.shape[-1]
    if dim < 1 or dim % (2 * axes):
        raise UserError(
            f"dim = {dim} cannot be shared by the sines and cosines of {axes} axes: it must "
            f"be a multiple of {2 * axes}"
        )
    share = dim // (2 * axes)
    frequencies = _LONGEST_WAVE ** (-torch.arange(share, dtype=torch.float64) / share)
    angles = coordinates.double()[:, :, None] * frequencies  # positions axes share
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1)


@cached_constant(maxsize=16)
def offset_sinusoids(
    shape: tuple[int, ...], dim: int, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "offsets dim"]:
    """Returns s of Eq. 10 for every offset on a grid, in the order of `Grid.distinct_offsets`.

    Do not write to it: equal arguments get the same tensor.
    """
    return sinusoid_of(Grid(shape).distinct_offsets().flatten(0, -2), dim).to(device, dtype)
