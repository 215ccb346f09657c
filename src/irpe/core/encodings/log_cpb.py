"""Swin v2's continuous bias: a small network of log-spaced offsets."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from irpe.core.cached import cached_constant
from irpe.core.encodings.protocol import (
    AttentionArguments,
    Encoding,
    HeadSize,
    OnGrid,
    check_whole_number,
)
from irpe.core.grid import Grid

_HIDDEN = 512
_REACH = 8  # offsets are stretched to -8 .. 8 before the logarithm, biases bounded by 8


@dataclass(frozen=True)
class LogCPB(Encoding):
    """Swin v2's log-spaced continuous position bias, one for each head.

    b_ij = sqrt(d) 8 tanh(f(offset) / 2), f a network with one hidden layer of 512 units: Swin v2's
    16 sigmoid(f) less 8, a constant that the softmax does not see. Its last layer starts at zero.
    Every pair with a prefix token has a learned bias of its own.

    Args:
        size: The positions along an axis on which the offsets are spaced; `None` takes the grid at
            hand. With the size of the training grid, larger grids extrapolate.
    """

    size: int | None = None
    mode = "bias"

    def __post_init__(self) -> None:
        if self.size is not None:
            check_whole_number("size", self.size, 2)

    def learned_rows(self, ndim: int) -> tuple[int, ...]:
        """Returns no row but that of prefix tokens."""
        return (0,)

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns the network, and the bias of prefix tokens if there are any."""
        shapes: dict[str, tuple[int, ...]] = {
            "hidden_weight": (_HIDDEN, size.ndim),
            "hidden_bias": (_HIDDEN,),
            "last_weight": (size.num_heads, _HIDDEN),
        }
        return {**shapes, "prefix_rows": (size.num_heads, 1)} if size.num_prefix_tokens else shapes

    def initialize(self, parameters: Mapping[str, Tensor]) -> None:
        """Sets the hidden layer as `nn.Linear` does, the rest to zero: so is the bias then."""
        bound = parameters["hidden_weight"].shape[1] ** -0.5
        for name, parameter in parameters.items():
            if name.startswith("hidden"):
                nn.init.uniform_(parameter, -bound, bound)
            else:
                nn.init.zeros_(parameter)

    def arguments_on(self, at: OnGrid, parameters: Mapping[str, Any]) -> AttentionArguments:
        """Returns the bias of every offset on the grid."""
        weight = parameters["hidden_weight"]
        offsets = log_offsets(at.shape, self.size, weight.device, weight.dtype)
        hidden = (offsets @ weight.T + parameters["hidden_bias"]).relu()
        bias = _REACH * (parameters["last_weight"] @ hidden.T / 2).tanh()  # heads, offsets
        if at.size.num_prefix_tokens:
            bias = torch.cat([bias, parameters["prefix_rows"]], dim=1)
        return AttentionArguments(bias_tables=[bias * at.size.head_dim**0.5])

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns the cost of the network on every offset."""
        offsets = math.prod(2 * size - 1 for size in grid.shape)
        return offsets * _HIDDEN * (grid.ndim + shape[1])

    def __str__(self) -> str:
        return "log-cpb" if self.size is None else f"log-cpb@{self.size}"


@cached_constant(maxsize=16)
def log_offsets(
    shape: tuple[int, ...], size: int | None, device: torch.device, dtype: torch.dtype
) -> Float[Tensor, "offsets axes"]:
    """Returns sign(x) log(1 + |x|) / log(8) of every offset, x stretched so that size - 1 is 8.

    Equal arguments get the same tensor; do not write to it.
    """
    longest = torch.tensor([max(1, (size or length) - 1) for length in shape])
    stretched = Grid(shape).distinct_offsets().flatten(0, -2).double() / longest * _REACH
    spaced = stretched.sign() * stretched.abs().log1p() / math.log(_REACH)
    return spaced.to(device, dtype)
