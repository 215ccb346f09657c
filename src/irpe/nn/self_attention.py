"""Multi-head self-attention with a relative position encoding."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from irpe.core.encodings import Encoding
from irpe.core.positions import Where
from irpe.errors import UserError
from irpe.nn.tables import RelativePositionEncoding
from irpe.ops.shapes import Mask


class RPEAttention(nn.Module):
    """Self-attention over the tokens of a grid and the prefix tokens before them.

    Args:
        dim: The dimension of a token; a multiple of `num_heads`.
        num_heads: The number of heads.
        spec: The encoding, or its text.
        num_prefix_tokens: How many tokens (class, registers) stand before the patches.
        qkv_bias: Whether queries, keys and values have a bias.
        attn_drop: Dropout of the attention weights, in training.
        proj_drop: Dropout of the output, in training.
        ndim: The number of axes of the grid.
        device: Where the parameters are made.
        dtype: The parameters' dtype.
        impl: As in `irpe.rpe_attention`.

    Examples:
        >>> import irpe, torch
        >>> attention = irpe.RPEAttention(64, num_heads=2, spec="product-contextual-qkv")
        >>> attention(torch.randn(8, 7 * 14, 64), grid=(7, 14)).shape
        torch.Size([8, 98, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        spec: Encoding | str,
        num_prefix_tokens: int = 0,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        ndim: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise UserError(f"dim = {dim} is not a multiple of num_heads = {num_heads}")
        self.num_heads = num_heads
        self.attn_drop = attn_drop
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.rpe = RelativePositionEncoding(
            spec, num_heads, dim // num_heads, num_prefix_tokens, ndim, device, dtype, impl
        )
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Float[Tensor, "batch tokens dim"],
        grid: Where,
        attn_mask: Mask | None = None,
    ) -> Float[Tensor, "batch tokens dim"]:
        """Returns the attended tokens.

        Args:
            x: The prefix tokens, then the tokens of the grid, row-major or as positions say.
            grid: The shape of the grid, for example (14, 14); or `irpe.Positions` where the tokens
                are not a whole grid.
            attn_mask: As in `irpe.rpe_attention`.
        """
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # batch tokens 3 heads dim
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        dropout_p = self.attn_drop if self.training else 0.0
        z = self.rpe(q, k, v, grid=grid, attn_mask=attn_mask, dropout_p=dropout_p)
        return self.proj_drop(self.proj(z.transpose(1, 2).flatten(2)))
