"""The shape of a tile and the warps that compute it, by kernel, dtype and head dimension."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """How a kernel is compiled.

    Args:
        queries: BLOCK_M.
        keys: BLOCK_N.
        warps: The warps of a program.
        stages: How many tiles are loaded ahead.
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


ROWS_AT_ONCE = 16  # rows of a table in one product after the walk


def tile_of(kernel: str, dtype: torch.dtype, block_dim: int) -> Tile:
    """Returns the tile of a kernel: "forward", "value", "query" or "key"."""
    if dtype == torch.float32 or block_dim > 64:
        return Tile(32, 64) if kernel == "key" else Tile(64, 32)
    return Tile(32, 64) if kernel == "key" else Tile(64, 32)


def block_dim_of(dim: int) -> int:
    """Returns the dimensions of a tile: a power of two that products take."""
    return max(16, 1 << (dim - 1).bit_length())
