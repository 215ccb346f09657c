"""The learned tables of one attention, as a module that computes attention with them."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from irpe.core.buckets import BucketMap, bucket_maps, check_num_prefix_tokens
from irpe.core.encodings import AxialDeepLab, Encoding, Sasa, TransformerXL, attention_encoding
from irpe.core.grid import Grid
from irpe.core.sinusoid import offset_sinusoids
from irpe.ops.attention import rpe_attention, rpe_attention_weights, rpe_scores
from irpe.ops.derive import axial_deeplab_tables, transformer_xl_arguments
from irpe.ops.shapes import Mask, Pairs, Tokens


class RelativePositionEncoding(nn.Module):
    """The tables of an encoding for one attention, all zero at the start.

    Transformer-XL's encoding has no tables: it learns `projection`, `content_shift`,
    `position_shift` and `prefix_rows` (W^R, u and v of Eq. 10, and the row of prefix tokens).

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
        spec: Encoding | str,
        num_heads: int,
        head_dim: int,
        num_prefix_tokens: int = 0,
        ndim: int = 2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_num_prefix_tokens(num_prefix_tokens)
        self.spec = attention_encoding(spec)
        self.num_prefix_tokens = num_prefix_tokens
        self.ndim = ndim
        heads = 1 if self.spec.shared_heads else num_heads
        rows = self.spec.num_buckets(ndim, num_prefix_tokens)
        targets = self.spec.targets if self.spec.mode == "contextual" else ""
        width = head_dim

        def learned(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        def tables(is_present: bool, *row_shape: int) -> nn.ParameterList:
            counts = rows if is_present else ()
            return nn.ParameterList(learned(heads, count, *row_shape) for count in counts)

        if isinstance(self.spec, TransformerXL):
            _check_divisible(head_dim, 2 * ndim, self.spec)
            targets = ""
            self.projection = learned(head_dim, head_dim)
            self.content_shift, self.position_shift = learned(head_dim), learned(head_dim)
            self.prefix_rows = learned(*rows, head_dim) if num_prefix_tokens else None
        elif isinstance(self.spec, Sasa):
            _check_divisible(head_dim, ndim, self.spec)
            width = head_dim // ndim
        self.query_tables = tables("q" in targets and not self.spec.tied, width)
        self.key_tables = tables("k" in targets, width)
        self.value_tables = tables("v" in targets, width)
        self.bias_tables = tables(self.spec.mode == "bias")
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
        maps = self.maps(grid, q.device)
        shift, tables = self._arguments(grid, q.device)
        return rpe_attention(
            q if shift is None else q + shift.to(q.dtype),
            k,
            v,
            maps,
            **tables,
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
        maps = self.maps(grid, q.device)
        shift, tables = self._arguments(grid, q.device)
        tables.pop("value_tables", None)
        return rpe_attention_weights(
            q if shift is None else q + shift.to(q.dtype),
            k,
            maps,
            **tables,
            attn_mask=attn_mask,
            scale=scale,
        )

    def scores(self, q: Tokens, k: Tokens, *, grid: Grid | Sequence[int]) -> Pairs:
        """Returns b_ij, what the encoding adds to the scores before they are scaled."""
        maps = self.maps(grid, q.device)
        shift, tables = self._arguments(grid, q.device)
        tables.pop("value_tables", None)
        if shift is None:
            return rpe_scores(q, k, maps, **tables)
        shift = shift.to(q.dtype)
        of_contents = (k @ shift).unsqueeze(-2)  # u k_j, the same for every query
        return rpe_scores(q + shift, k, maps, **tables) + of_contents

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

    def _arguments(
        self, grid: Grid | Sequence[int], device: torch.device
    ) -> tuple[Tensor | None, dict[str, list[Tensor]]]:
        """Returns what is added to the queries, if anything, and the tables of attention."""
        if isinstance(self.spec, TransformerXL):
            dim, dtype = self.projection.shape[0], self.projection.dtype
            return transformer_xl_arguments(
                offset_sinusoids(grid, dim, device, dtype),
                self.projection,
                self.prefix_rows,
                self.content_shift,
                self.position_shift,
            )
        names = ("query_tables", "key_tables", "value_tables", "bias_tables")
        tables: dict[str, list[Tensor]] = {name: list(getattr(self, name)) for name in names}
        if self.spec.tied:  # Eq. 11: p_ij is shared by queries and keys
            tables["query_tables"] = tables["key_tables"]
        if isinstance(self.spec, AxialDeepLab):
            has_prefix = self.num_prefix_tokens > 0
            tables = {name: axial_deeplab_tables(tables[name], has_prefix) for name in names}
        return None, tables

    def extra_repr(self) -> str:
        """Returns what `print(module)` shows."""
        return f"{self.spec}, num_prefix_tokens={self.num_prefix_tokens}"


def _check_divisible(head_dim: int, parts: int, spec: Encoding) -> None:
    if head_dim % parts:
        raise ValueError(
            f"{spec}: heads of dimension {head_dim} cannot be shared by the axes of the grid: it "
            f"must be a multiple of {parts}"
        )
