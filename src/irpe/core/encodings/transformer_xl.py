"""Transformer-XL's encoding, Eq. 10."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from irpe.core.encodings.protocol import (
    AttentionArguments,
    Encoding,
    HeadSize,
    OnGrid,
    check_splits_head,
)
from irpe.core.grid import Grid
from irpe.core.sinusoid import offset_sinusoids


@dataclass(frozen=True)
class TransformerXL(Encoding):
    """Transformer-XL's encoding, Eq. 10: projected sines of the offset, and two learned vectors.

    e_ij = ((q_i + u) k_j + (q_i + v) r_ij) / sqrt(d) with r_ij = s_{i-j} W^R. With q' = q + u in
    the place of q, q_i + v = q'_i + (v - u): a key table r and a bias (v - u) r. It learns W^R
    (projection), u (content_shift), v (position_shift) and the row of pairs with a prefix token.
    """

    takes_rotation = False  # it shifts the queries of the product itself

    def learned_rows(self, ndim: int) -> tuple[int, ...]:
        """Returns no row but that of prefix tokens."""
        return (0,)

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns the projection, two vectors, and the row of prefix tokens if there are any."""
        dim = size.head_dim
        check_splits_head(self, dim, 2 * size.ndim)
        shapes = {"projection": (dim, dim), "content_shift": (dim,), "position_shift": (dim,)}
        return {**shapes, "prefix_rows": (1, dim)} if size.num_prefix_tokens else shapes

    def arguments_on(self, at: OnGrid, parameters: Mapping[str, Any]) -> AttentionArguments:
        """Returns the projected sines of every offset on the grid, and what goes with them."""
        weight = parameters["projection"]
        rows = offset_sinusoids(at.shape, at.size.head_dim, weight.device, weight.dtype) @ weight
        if at.size.num_prefix_tokens:
            rows = torch.cat([rows, parameters["prefix_rows"]])
        content_shift = parameters["content_shift"]
        bias = (rows * (parameters["position_shift"] - content_shift)).sum(-1)
        return AttentionArguments(
            key_tables=[rows.unsqueeze(0)],
            bias_tables=[bias.unsqueeze(0)],
            query_shift=content_shift,
        )

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns the cost of Eq. 26 or 27, and that of the projection of every offset."""
        offsets = math.prod(2 * size - 1 for size in grid.shape)
        return super().extra_macs(shape, grid, used_rows) + offsets * shape[-1] ** 2

    def __str__(self) -> str:
        return "transformer-xl"
