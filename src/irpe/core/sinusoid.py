"""The fixed absolute encoding: sines and cosines of each axis (Eq. 4's fixed choice)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from irpe.core.grid import Grid

_LONGEST_WAVE = 10000.0


def sinusoid(grid: Grid | Sequence[int], dim: int) -> Float[Tensor, "positions dim"]:
    """Returns an encoding of every position: an equal share of the dimensions for each axis.

    Args:
        grid: The shape of the grid.
        dim: The dimension of a token; a multiple of twice the number of axes.
    """
    grid = Grid.of(grid)
    if dim < 1 or dim % (2 * grid.ndim):
        raise ValueError(
            f"dim = {dim} cannot be shared by the sines and cosines of {grid.ndim} axes: it must "
            f"be a multiple of {2 * grid.ndim}"
        )
    share = dim // (2 * grid.ndim)
    frequencies = _LONGEST_WAVE ** (-torch.arange(share, dtype=torch.float64) / share)
    angles = grid.coordinates().double()[:, :, None] * frequencies  # positions axes share
    return torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(1).float()
