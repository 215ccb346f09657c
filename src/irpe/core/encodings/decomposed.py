"""The decomposed relative positions of ViTDet and SAM."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from jaxtyping import Float
from torch import Tensor

from irpe.core.encodings.protocol import AttentionArguments, Encoding, OnGrid, check_whole_number
from irpe.core.grid import Grid
from irpe.core.index import Clip


@dataclass(frozen=True)
class Decomposed(Encoding):
    """`cross-contextual-k` with a table row for every offset, resized to the grid at hand.

    b_ij = q_i . (p^y_dy + p^x_dx). On a grid of another size the rows are interpolated linearly,
    each axis by itself, as ViTDet and SAM do; the prefix row stays. ViTDet and SAM add it to the
    scaled scores: their tables times sqrt(d) are these.

    Args:
        size: The positions along an axis for which every offset has a row of its own.
    """

    size: int = 14
    method = "cross"

    def __post_init__(self) -> None:
        check_whole_number("size", self.size, 1)

    def index_on(self, grid: Grid) -> Clip:
        """Returns the identity on the longest axis."""
        return Clip(max(1, max(grid.shape) - 1))

    def learned_rows(self, ndim: int) -> tuple[int, ...]:
        """Returns a row for each offset on an axis of `size` positions, for each axis."""
        return (2 * self.size - 1,) * ndim

    def arguments_on(self, at: OnGrid, parameters: Mapping[str, Any]) -> AttentionArguments:
        """Returns the tables, resized to the axes of the grid."""
        reach, has_prefix = max(1, max(at.shape) - 1), at.size.num_prefix_tokens > 0
        tables = zip(parameters["key_tables"], at.shape, strict=True)
        resized = [_resize(table, length, reach, has_prefix) for table, length in tables]
        return AttentionArguments(key_tables=resized)

    def __str__(self) -> str:
        return f"decomposed@{self.size}"


def _resize(
    table: Float[Tensor, "1 rows dim"], length: int, reach: int, has_prefix: bool
) -> Float[Tensor, "1 resized dim"]:
    """Returns a table with a row for every offset of an axis of `length` positions.

    They are in the middle of those up to `reach`, the longest offset along any axis.
    """
    offsets, prefix = table.split([table.shape[1] - has_prefix, int(has_prefix)], dim=1)
    if offsets.shape[1] != 2 * length - 1:
        offsets = F.interpolate(offsets.mT, size=2 * length - 1, mode="linear").mT
    margin = reach - (length - 1)
    return torch.cat([F.pad(offsets, (0, 0, margin, margin)), prefix], dim=1)
