"""A rotation and an encoding with tables in one attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from irpe.core.augmentation import Augmentation
from irpe.core.encodings.protocol import AttentionArguments, Encoding, HeadSize, OnGrid
from irpe.core.grid import Grid
from irpe.core.index import Index


@dataclass(frozen=True)
class Joined(Encoding):
    """Queries and keys are rotated for their product; tables are multiplied with the unrotated.

    A rotated query times a table row would depend on where the query is, not on the offset alone.

    Args:
        rotation: The rotary part.
        tables: The part with tables.
    """

    rotation: Encoding
    tables: Encoding
    # Fields, because a compiler does not trace properties of a constant.
    method: str | None = field(init=False, repr=False, compare=False)
    mode: str = field(init=False, repr=False, compare=False)
    targets: str = field(init=False, repr=False, compare=False)
    augmentation: Augmentation = field(init=False, repr=False, compare=False)
    keeps_output = False
    takes_rotation = False

    def __post_init__(self) -> None:
        for name in ("method", "mode", "targets"):
            object.__setattr__(self, name, getattr(self.tables, name))
        object.__setattr__(self, "augmentation", self.rotation.augmentation)

    def index_on(self, grid: Grid) -> Index | None:
        """Returns the index function of the tables."""
        return self.tables.index_on(grid)

    def learned_rows(self, ndim: int) -> tuple[int, ...]:
        """Returns the rows of the tables."""
        return self.tables.learned_rows(ndim)

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of both parts, whose names differ."""
        return {**self.rotation.parameter_shapes(size), **self.tables.parameter_shapes(size)}

    def initialize(self, parameters: Mapping[str, Tensor]) -> None:
        """Sets the parameters of both parts to their initial values."""
        of_rotation, of_tables = _split(parameters)
        self.rotation.initialize(of_rotation)
        self.tables.initialize(of_tables)

    def arguments_on(self, at: OnGrid, parameters: Mapping[str, Any]) -> AttentionArguments:
        """Returns the rotation of the one part and the tables of the other."""
        of_rotation, of_tables = _split(parameters)
        rotation = self.rotation.arguments_on(at, of_rotation).rotation
        return self.tables.arguments_on(at, of_tables)._replace(rotation=rotation)

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns the cost of both parts."""
        of_rotation = self.rotation.extra_macs(shape, grid, used_rows)
        return of_rotation + self.tables.extra_macs(shape, grid, used_rows)

    def __str__(self) -> str:
        return f"{self.rotation}+{self.tables}"


def _split(parameters: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the parameters of the rotation, then those of the tables."""
    is_rotary = {name: name == "frequencies" for name in parameters}
    return (
        {name: parameters[name] for name in parameters if is_rotary[name]},
        {name: parameters[name] for name in parameters if not is_rotary[name]},
    )
