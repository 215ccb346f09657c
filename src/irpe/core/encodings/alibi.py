"""ALiBi on images: a fixed penalty for distance."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from irpe.core.cached import cached_constant
from irpe.core.encodings.protocol import AttentionArguments, Encoding, HeadSize, OnGrid
from irpe.core.grid import Grid


@dataclass(frozen=True)
class Alibi2D(Encoding):
    """A fixed slope for each head times the Euclidean distance; nothing is learned.

    b_ij = -sqrt(d) 2^(-8 h / H) |position_i - position_j| for head h = 1 .. H: ALiBi's slopes. A
    pair with a prefix token has none.
    """

    mode = "bias"
    keeps_output = False

    def learned_rows(self, ndim: int) -> tuple[int, ...]:
        """Returns nothing: the slopes are fixed."""
        return ()

    def arguments_on(self, at: OnGrid, parameters: Mapping[str, Any]) -> AttentionArguments:
        """Returns the bias of every offset on the grid."""
        dtype = torch.promote_types(at.dtype, torch.float32)
        return AttentionArguments(bias_tables=[_bias(at.shape, at.size, at.device, dtype)])

    def __str__(self) -> str:
        return "alibi-2d"


@cached_constant(maxsize=16)
def _bias(
    shape: tuple[int, ...], size: HeadSize, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns the bias of each head and offset, with a zero for prefix tokens if there are any."""
    distances = Grid(shape).distinct_offsets().flatten(0, -2).double().norm(dim=-1)
    heads = torch.arange(1, size.num_heads + 1, dtype=torch.float64)
    slopes = 2.0 ** (-8 * heads / size.num_heads)
    bias = -(size.head_dim**0.5) * slopes[:, None] * distances
    if size.num_prefix_tokens:
        bias = torch.cat([bias, bias.new_zeros(size.num_heads, 1)], dim=1)
    return bias.to(device, dtype)
