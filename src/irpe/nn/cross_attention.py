"""Multi-head cross-attention with a relative position encoding."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from irpe.core.encodings import Encoding
from irpe.core.positions import Positions
from irpe.errors import UserError
from irpe.nn.tables import RelativePositionEncoding
from irpe.ops.shapes import Mask


class RPECrossAttention(nn.Module):
    """Attention of tokens to others: a decoder or a resampler that looks at a grid.

    Queries have positions of their own. Those that have none stand before the others and count as
    prefix tokens: all their pairs use the prefix row.

    Args:
        dim: The dimension of a query token; a multiple of `num_heads`.
        num_heads: The number of heads.
        spec: The encoding, or its text.
        context_dim: The dimension of a token that is attended to; `None` if it is `dim`.
        num_prefix_tokens: How many tokens without a position stand before the queries, and before
            the keys.
        qkv_bias: Whether queries, keys and values have a bias.
        attn_drop: Dropout of the attention weights, in training.
        proj_drop: Dropout of the output, in training.
        ndim: The number of axes of positions.
        device: Where the parameters are made.
        dtype: The parameters' dtype.
        impl: As in `irpe.rpe_attention`.

    Examples:
        >>> import irpe, torch
        >>> attention = irpe.RPECrossAttention(64, 2, "product-contextual-k", context_dim=32)
        >>> positions = irpe.Positions(irpe.Grid((14, 14)), irpe.PooledGrid((7, 7), stride=2))
        >>> attention(torch.randn(8, 196, 64), torch.randn(8, 49, 32), positions).shape
        torch.Size([8, 196, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        spec: Encoding | str,
        context_dim: int | None = None,
        num_prefix_tokens: tuple[int, int] = (0, 0),
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
        self.num_heads, self.attn_drop = num_heads, attn_drop
        self.num_prefix_tokens = num_prefix_tokens
        self.q = nn.Linear(dim, dim, bias=qkv_bias, device=device, dtype=dtype)
        self.kv = nn.Linear(context_dim or dim, 2 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.rpe = RelativePositionEncoding(
            spec, num_heads, dim // num_heads, max(num_prefix_tokens), ndim, device, dtype, impl
        )
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Float[Tensor, "batch queries dim"],
        context: Float[Tensor, "batch keys context_dim"],
        positions: Positions,
        attn_mask: Mask | None = None,
    ) -> Float[Tensor, "batch queries dim"]:
        """Returns what the queries find in the context.

        Args:
            x: The tokens that ask: those without a position first.
            context: The tokens that are asked, likewise.
            positions: Where both are.
            attn_mask: As in `irpe.rpe_attention`.
        """
        if positions.prefixes != tuple(self.num_prefix_tokens):
            raise UserError(
                f"positions with {positions.prefixes} prefix tokens for queries and keys, but the "
                f"attention was made with num_prefix_tokens={tuple(self.num_prefix_tokens)}"
            )
        heads = (self.num_heads, -1)
        q = self.q(x).unflatten(-1, heads).transpose(1, 2)
        k, v = self.kv(context).unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4).unbind(0)
        dropout_p = self.attn_drop if self.training else 0.0
        z = self.rpe(q, k, v, grid=positions, attn_mask=attn_mask, dropout_p=dropout_p)
        return self.proj_drop(self.proj(z.transpose(1, 2).flatten(2)))
