"""ALiBi on images: a fixed penalty for distance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from irpe.core.cached import built_once, traced_as_constant
from irpe.core.encodings.protocol import AttentionArguments, HeadSize
from irpe.core.positions import Grid, grid_shape


@dataclass(frozen=True)
class Alibi2D:
    """A fixed slope for each head times the Euclidean distance; nothing is learned.

    b_ij = -sqrt(d) 2^(-8 h / H) |position_i - position_j| for head h = 1 .. H: ALiBi's slopes. A
    pair with a prefix token has none.
    """

    method: ClassVar[str] = "product"
    mode: ClassVar[str] = "bias"
    targets: ClassVar[str] = "k"
    keeps_output: ClassVar[bool] = False
    any_positions: ClassVar[bool] = False

    def index_on(self, grid: Grid) -> None:
        """Returns no index: every offset of a grid has a row of its own."""

    def num_buckets(self, ndim: int, num_prefix_tokens: int) -> tuple[int, ...]:
        """Returns the learned rows: none."""
        return (0,)

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns nothing: the slopes are fixed."""
        return {}

    def initialize(self, parameters: Mapping[str, Tensor]) -> None:
        """Does nothing: there is nothing to learn."""

    def arguments_on(
        self,
        grid: Grid | Sequence[int],
        parameters: Mapping[str, Tensor],
        size: HeadSize,
        like: Tensor,
    ) -> AttentionArguments:
        """Returns the bias of every offset on the grid."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        bias = _constant_bias(grid_shape(grid), size, like.device, dtype)
        return AttentionArguments(bias_tables=[bias])

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns 0: a bias is gathered and added, no product."""
        return 0

    def __str__(self) -> str:
        return "alibi-2d"


@traced_as_constant
def _constant_bias(
    shape: tuple[int, ...], size: HeadSize, device: torch.device, dtype: torch.dtype
) -> Tensor:
    return _cached_bias(Grid.of(shape), size, device, dtype)


@built_once(maxsize=16)
def _cached_bias(grid: Grid, size: HeadSize, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns the bias of each head and offset, with a zero for prefix tokens if there are any."""
    distances = grid.distinct_offsets().flatten(0, -2).double().norm(dim=-1)
    heads = torch.arange(1, size.num_heads + 1, dtype=torch.float64)
    slopes = 2.0 ** (-8 * heads / size.num_heads)
    bias = -(size.head_dim**0.5) * slopes[:, None] * distances
    if size.num_prefix_tokens:
        bias = torch.cat([bias, bias.new_zeros(size.num_heads, 1)], dim=1)
    return bias.to(device, dtype)
