"""CPVT's positions: generated from the tokens by a convolution, which knows where the border is."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor, nn

from irpe.errors import UserError


class PositionGenerator(nn.Module):
    """Adds to each patch token a 3 x 3 depthwise convolution of its neighbourhood.

    x_p <- x_p + b + sum over the nine offsets o of w_o * x_{p + o}, with zeros outside the grid;
    prefix tokens are left alone. Weight and bias are zero at the start, so nothing changes then.

    Args:
        dim: The dimension of a token.
        num_prefix_tokens: How many tokens stand before the patches.
        device: Where the parameters are made.
        dtype: The parameters' dtype.
    """

    def __init__(
        self,
        dim: int,
        num_prefix_tokens: int,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_prefix_tokens = num_prefix_tokens
        self.weight = nn.Parameter(torch.empty(dim, 1, 3, 3, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets all parameters to zero: tokens are then what they are without."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self, x: Float[Tensor, "batch tokens dim"], grid: Sequence[int]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Returns the tokens with generated positions.

        Args:
            x: The prefix tokens, then the tokens of the grid in row-major order.
            grid: Rows and columns.
        """
        count, patches = self.num_prefix_tokens, x[:, self.num_prefix_tokens :]
        if len(grid) != 2 or grid[0] * grid[1] != patches.shape[1]:
            raise UserError(
                f"grid {tuple(grid)} does not hold the {patches.shape[1]} tokens after {count} "
                "prefix tokens: pass the rows and columns of this input"
            )
        image = patches.mT.unflatten(2, tuple(grid))  # batch dim rows columns
        generated = F.conv2d(image, self.weight, self.bias, padding=1, groups=len(self.weight))
        return torch.cat([x[:, :count], patches + generated.flatten(2).mT], dim=1)

    def extra_repr(self) -> str:
        """Returns what `print(module)` shows."""
        return f"cpvt, num_prefix_tokens={self.num_prefix_tokens}"
