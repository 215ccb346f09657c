"""The shape of a tile and the warps that compute it, by kernel, dtype and head dimension.

Chosen so that 16-bit kernels hold a tile in registers: `python -m benchmarks.triton` shows what a
compiler makes of it. Nothing was timed yet.
"""

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


def tile_of(kernel: str, dtype: torch.dtype, block_dim: int, num_terms: int) -> Tile:
    """Returns the tile of a kernel.

    Args:
        kernel: "forward", "value", "query", "key" or "mask".
        dtype: The dtype of q.
        block_dim: The dimensions of a tile.
        num_terms: What each score takes beside the product: values looked up, a mask, dropout.
    """
    if dtype == torch.float32:
        return Tile(32, 32, warps=8)
    warps = 8 if block_dim > 64 else 4
    if kernel == "key":
        return Tile(32 if num_terms <= 2 else 16, 64, warps)
    is_full = kernel in ("query", "value") and num_terms > 4
    return Tile(64, 32, 8 if is_full else warps)


def block_dim_of(dim: int) -> int:
    """Returns the dimensions of a tile: a power of two that products take."""
    return max(16, 1 << (dim - 1).bit_length())
