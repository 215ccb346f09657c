"""The learned tables of one attention, as a module that computes attention with them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from irpe.core.buckets import BucketMap, bucket_maps, check_num_prefix_tokens
from irpe.core.grid import Grid
from irpe.core.spec import RPESpec
from irpe.ops.attention import rpe_attention, rpe_attention_weights, rpe_scores
from irpe.ops.shapes import Mask, Pairs, Tokens


class RelativePositionEncoding(nn.Module):
    """The tables of an encoding for one attention, all zero at the start.

    Called with queries, keys and values that are split into heads, it stands where a model calls
    `scaled_dot_product_attention`.

    Args:
        spec: The encoding, or its text.
        num_heads: The heads of the attention.
        head_dim: The dimension of one head.
        num_prefix_tokens: How many tokens stand before the patches.
        ndim: The number of axes of the grid.
        device: Where the tables are made.
        dtype: The tables' dtype.
    """

    query_tables: nn.ParameterList
    key_tables: nn.ParameterList
    value_tables: nn.ParameterList
    bias_tables: nn.ParameterList

    def __init__(
        self,
        spec: RPESpec | str,
        num_heads: int,
        head_dim: int,
        num_prefix_tokens: int = 0,
        ndim: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_num_prefix_tokens(num_prefix_tokens)
        self.spec = RPESpec.of(spec)
        self.num_prefix_tokens = num_prefix_tokens
        self.ndim = ndim
        rows = self.spec.num_buckets(ndim, num_prefix_tokens)
        heads = 1 if self.spec.shared_heads else num_heads

        def tables(is_present: bool, *row_shape: int) -> nn.ParameterList:
            shapes = [(heads, count, *row_shape) for count in rows] if is_present else []
            return nn.ParameterList(
                nn.Parameter(torch.empty(shape, device=device, dtype=dtype)) for shape in shapes
            )

        is_contextual = self.spec.mode == "contextual"
        self.query_tables = tables(is_contextual and "q" in self.spec.targets, head_dim)
        self.key_tables = tables(is_contextual and "k" in self.spec.targets, head_dim)
        self.value_tables = tables(is_contextual and "v" in self.spec.targets, head_dim)
        self.bias_tables = tables(not is_contextual)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets all tables to zero: attention is then what it is without an encoding."""
        for table in self.parameters():
            nn.init.zeros_(table)

    def forward(
        self,
        q: Tokens,
        k: Tokens,
        v: Tokens,
        *,
        grid: Grid | Sequence[int],
        attn_mask: Mask | None = None,
        dropout_p: float = 0.0,
        scale: float | None = None,
        impl: str = "auto",
    ) -> Tokens:
        """Returns attention with the encoding; arguments as in `irpe.rpe_attention`."""
        return rpe_attention(
            q,
            k,
            v,
            self.maps(grid, q.device),
            query_tables=list(self.query_tables),
            key_tables=list(self.key_tables),
            value_tables=list(self.value_tables),
            bias_tables=list(self.bias_tables),
            attn_mask=attn_mask,
            dropout_p=dropout_p,
            scale=scale,
            impl=impl,
        )

    def weights(
        self,
        q: Tokens,
        k: Tokens,
        *,
        grid: Grid | Sequence[int],
        attn_mask: Mask | None = None,
        scale: float | None = None,
    ) -> Pairs:
        """Returns the attention weights a_ij."""
        return rpe_attention_weights(
            q,
            k,
            self.maps(grid, q.device),
            **self._score_tables(),
            attn_mask=attn_mask,
            scale=scale,
        )

    def scores(self, q: Tokens, k: Tokens, *, grid: Grid | Sequence[int]) -> Pairs:
        """Returns b_ij, what the encoding adds to the scores before they are scaled."""
        return rpe_scores(q, k, self.maps(grid, q.device), **self._score_tables())

    def maps(
        self, grid: Grid | Sequence[int], device: torch.device | str = "cpu"
    ) -> tuple[BucketMap, ...]:
        """Returns the bucket maps on a grid; equal encodings share them."""
        ndim = len(grid.shape if isinstance(grid, Grid) else grid)
        if ndim != self.ndim:
            raise ValueError(
                f"grid {grid} has {ndim} axes but the tables were made for {self.ndim} axes: pass "
                f"another grid, or make the encoding with ndim={ndim}"
            )
        return bucket_maps(self.spec, grid, self.num_prefix_tokens, device)

    def _score_tables(self) -> dict[str, list[Tensor]]:
        names = ("query_tables", "key_tables", "bias_tables")
        return {name: list(getattr(self, name)) for name in names}

    def extra_repr(self) -> str:
        """Returns what `print(module)` shows."""
        return f"{self.spec}, num_prefix_tokens={self.num_prefix_tokens}"
