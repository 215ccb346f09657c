"""Multi-head attention with a relative position encoding: of tokens to each other, or to others."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from irpe.core.encodings import Encoding
from irpe.core.positions import Positions, Where
from irpe.errors import UserError
from irpe.nn.tables import RelativePositionEncoding
from irpe.ops.shapes import Keys, Mask, Tokens


class _MultiHead(nn.Module):
    """The encoding and what follows it; the layers before it are given, by name."""

    def __init__(
        self,
        inputs: Mapping[str, nn.Linear],
        dim: int,
        num_heads: int,
        spec: Encoding | str,
        num_prefix_tokens: int,
        attn_drop: float,
        proj_drop: float,
        ndim: int,
        impl: str,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise UserError(f"dim = {dim} is not a multiple of num_heads = {num_heads}")
        self.num_heads, self.attn_drop = num_heads, attn_drop
        for name, layer in inputs.items():
            self.add_module(name, layer)
        weight = next(iter(inputs.values())).weight
        device, dtype = weight.device, weight.dtype
        self.rpe = RelativePositionEncoding(
            spec, num_heads, dim // num_heads, num_prefix_tokens, ndim, device, dtype, impl
        )
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def _attend(self, q: Tokens, k: Keys, v: Keys, grid: Where, attn_mask: Mask | None) -> Tensor:
        dropout_p = self.attn_drop if self.training else 0.0
        z = self.rpe(q, k, v, grid=grid, attn_mask=attn_mask, dropout_p=dropout_p)
        return self.proj_drop(self.proj(z.transpose(1, 2).flatten(2)))


class RPEAttention(_MultiHead):
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

    qkv: nn.Linear

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
        qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        super().__init__(
            {"qkv": qkv}, dim, num_heads, spec, num_prefix_tokens, attn_drop, proj_drop, ndim, impl
        )

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
        return self._attend(q, k, v, grid, attn_mask)


class RPECrossAttention(_MultiHead):
    """Attention of tokens to others: a decoder or a resampler that looks at a grid.

    Queries have positions of their own. Those that have none stand before the others and count as
    prefix tokens: all their pairs use the prefix row.

    Args:
        dim: The dimension of a query token; a multiple of `num_heads`. Arguments that are not
            listed are those of `irpe.RPEAttention`.
        context_dim: The dimension of a token that is attended to; `None` if it is `dim`.
        num_prefix_tokens: How many tokens without a position stand before the queries, and before
            the keys.
        ndim: The number of axes of positions.

    Examples:
        >>> import irpe, torch
        >>> attention = irpe.RPECrossAttention(64, 2, "product-contextual-k", context_dim=32)
        >>> positions = irpe.Positions(irpe.Grid((14, 14)), irpe.PooledGrid((7, 7), stride=2))
        >>> attention(torch.randn(8, 196, 64), torch.randn(8, 49, 32), positions).shape
        torch.Size([8, 196, 64])
    """

    q: nn.Linear
    kv: nn.Linear

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
        inputs = {
            name: nn.Linear(width, out, bias=qkv_bias, device=device, dtype=dtype)
            for name, width, out in (("q", dim, dim), ("kv", context_dim or dim, 2 * dim))
        }
        most = max(num_prefix_tokens)
        super().__init__(inputs, dim, num_heads, spec, most, attn_drop, proj_drop, ndim, impl)
        self.num_prefix_tokens = num_prefix_tokens

    def forward(
        self,
        x: Float[Tensor, "batch queries dim"],
        context: Float[Tensor, "batch keys context_dim"],
        positions: Positions,
        attn_mask: Mask | None = None,
    ) -> Float[Tensor, "batch queries dim"]:
        """Returns the attended query tokens.

        Args:
            x: Query tokens, those without a position first.
            context: The tokens that are attended to, likewise.
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
        return self._attend(q, k, v, positions, attn_mask)
