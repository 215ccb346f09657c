"""Axial-DeepLab's position-sensitive terms on standard self-attention (section 3.1)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from irpe.core.encodings.protocol import (
    KINDS,
    AttentionArguments,
    Encoding,
    OnGrid,
    check_whole_number,
)
from irpe.core.grid import Grid
from irpe.core.index import Cut, Index


@dataclass(frozen=True)
class AxialDeepLab(Encoding):
    """Axial-DeepLab's position-sensitive terms: q, k and v, per axis, zero beyond a threshold.

    With r^q, r^k, r^v its terms for the row and for the column offset:
    e_ij = (q_i k_j + q_i r^q_ij + k_j r^k_ij) / sqrt(d), z_i = sum_j a_ij (v_j + r^v_ij).
    They are the tables of keys, queries and values in this order.

    Args:
        threshold: The longest offset along an axis that has a row.
    """

    threshold: int = 3
    method = "cross"
    targets = "qkv"
    any_positions = True

    def __post_init__(self) -> None:
        check_whole_number("threshold", self.threshold, 1)

    def index_on(self, grid: Grid) -> Index:
        """Returns the identity up to the threshold, with one index for everything beyond."""
        return Cut(self.threshold)

    def learned_rows(self, ndim: int) -> tuple[int, ...]:
        """Returns a row for each offset up to the threshold, for each axis."""
        return (2 * self.threshold + 1,) * ndim

    def arguments_on(self, at: OnGrid, parameters: Mapping[str, Any]) -> AttentionArguments:
        """Returns the learned rows with rows of zeros for the offsets beyond the threshold."""
        has_prefix = at.size.num_prefix_tokens > 0

        def with_zeros(table: Tensor) -> Tensor:
            patches, prefix = table.split([table.shape[1] - has_prefix, int(has_prefix)], dim=1)
            return torch.cat([F.pad(patches, (0, 0, 1, 1)), prefix], dim=1)

        query, key, value = (
            [with_zeros(table) for table in parameters[name]] for name in KINDS.values()
        )
        return AttentionArguments(query, key, value)

    def __str__(self) -> str:
        return f"axial-deeplab@{self.threshold}"
