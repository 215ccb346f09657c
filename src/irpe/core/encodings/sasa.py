"""SASA's encoding: the concatenation of Eq. 12."""

from collections.abc import Sequence
from dataclasses import dataclass

from irpe.core.encodings.protocol import Encoding, HeadSize, check_splits_head, check_whole_number
from irpe.core.grid import Grid
from irpe.core.index import Clip, Index
from irpe.errors import UserError


@dataclass(frozen=True)
class Sasa(Encoding):
    """SASA's encoding, Eq. 12: a row vector beside a column vector, each with a part of a head.

    Args:
        size: The longest axis that the tables cover: every offset on it has a row of its own.
    """

    size: int = 32
    method = "cross"

    def __post_init__(self) -> None:
        check_whole_number("size", self.size, 2)

    def index_on(self, grid: Grid) -> Index:
        """Returns the identity, or raises an error if the grid is larger than the tables."""
        longest = max(grid.shape)
        if longest > self.size:
            raise UserError(
                f"grid {grid} is larger than the tables of {self}: an offset beyond them has no "
                f"row; equip the model with 'sasa@{longest}' before it is trained"
            )
        return Clip(self.size - 1)

    def learned_rows(self, ndim: int) -> tuple[int, ...]:
        """Returns a row for each offset on an axis of `size` positions, for each axis."""
        return (2 * self.size - 1,) * ndim

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns a key table for each axis, with an equal part of a head."""
        check_splits_head(self, size.head_dim, size.ndim)
        return super().parameter_shapes(size._replace(head_dim=size.head_dim // size.ndim))

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns the cost of Eq. 27 on a part of a head for each axis."""
        return super().extra_macs(shape, grid, used_rows) // len(used_rows)

    def __str__(self) -> str:
        return f"sasa@{self.size}"
