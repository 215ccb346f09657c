"""A rotation and an encoding with tables in one attention."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from irpe.core.augmentation import NONE, Augmentation
from irpe.core.encodings.alibi import Alibi2D
from irpe.core.encodings.axial_deeplab import AxialDeepLab
from irpe.core.encodings.decomposed import Decomposed
from irpe.core.encodings.log_cpb import LogCPB
from irpe.core.encodings.protocol import AttentionArguments, HeadSize
from irpe.core.encodings.rope import RopeAxial, RopeMixed
from irpe.core.encodings.sasa import Sasa
from irpe.core.encodings.spec import RPESpec
from irpe.core.index import Index
from irpe.core.positions import Grid, Sample

Rotary = RopeAxial | RopeMixed
# Transformer-XL is not among them: it shifts the queries of the product itself.
WithTables = RPESpec | Sasa | AxialDeepLab | Decomposed | LogCPB | Alibi2D


@dataclass(frozen=True)
class Joined:
    """Queries and keys are turned for their product; tables meet them before that.

    A turned query times a table row would depend on where the query is, not on the offset alone.

    Args:
        rotation: The rotary part.
        tables: The part with tables.
    """

    rotation: Rotary
    tables: WithTables

    @property
    def method(self) -> str | None:
        """The method of the tables."""
        return self.tables.method

    @property
    def mode(self) -> str:
        """The mode of the tables."""
        return self.tables.mode

    @property
    def targets(self) -> str:
        """The targets of the tables."""
        return self.tables.targets

    @property
    def keeps_output(self) -> bool:
        """Never: a rotation changes what a trained model returns."""
        return False

    @property
    def any_positions(self) -> bool:
        """No: a rotation is made for the positions on one grid."""
        return False

    def index_on(self, grid: Grid) -> Index | None:
        """Returns the index function of the tables."""
        return self.tables.index_on(grid)

    def num_buckets(self, ndim: int, num_prefix_tokens: int) -> tuple[int, ...]:
        """Returns the rows of the tables."""
        return self.tables.num_buckets(ndim, num_prefix_tokens)

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of both parts, whose names differ."""
        return {**self.rotation.parameter_shapes(size), **self.tables.parameter_shapes(size)}

    def initialize(self, parameters: Mapping[str, Tensor]) -> None:
        """Sets the parameters of both parts to their initial values."""
        for part, own in zip((self.rotation, self.tables), _split(parameters), strict=True):
            part.initialize(own)

    def arguments_on(
        self,
        grid: Grid | Sequence[int],
        parameters: Mapping[str, Tensor],
        size: HeadSize,
        like: Tensor,
        sample: Sample | None = None,
    ) -> AttentionArguments:
        """Returns the rotation of the one part and the tables of the other."""
        of_rotation, of_tables = _split(parameters)
        rotation = self.rotation.arguments_on(grid, of_rotation, size, like, sample).rotation
        return self.tables.arguments_on(grid, of_tables, size, like)._replace(rotation=rotation)

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns the cost of both parts."""
        of_rotation = self.rotation.extra_macs(shape, grid, used_rows)
        return of_rotation + self.tables.extra_macs(shape, grid, used_rows)

    def __str__(self) -> str:
        return f"{self.rotation}+{self.tables}"


def augmentation_of(encoding: object) -> Augmentation:
    """Returns how an encoding augments positions in training; most do not."""
    rotation = encoding.rotation if isinstance(encoding, Joined) else encoding
    return rotation.augmentation if isinstance(rotation, Rotary) else NONE


def is_trained_as(encoding: object, other: object) -> bool:
    """Returns whether what another encoding learned means the same in this one.

    So it does if they differ in the augmentation alone, or if this one has a reference grid more.

    Args:
        encoding: The encoding.
        other: The encoding that learned.
    """
    return _as_trained(encoding, other) == _as_trained(other, other)


def _as_trained(encoding: Any, other: Any) -> Any:
    """Returns an encoding as trained: no augmentation, no reference unless the other has one."""
    if isinstance(encoding, Joined):
        inner = other.rotation if isinstance(other, Joined) else other
        return replace(encoding, rotation=_as_trained(encoding.rotation, inner))
    if not isinstance(encoding, Rotary):
        return encoding
    plain = replace(encoding, augmentation=NONE)
    return plain if getattr(other, "reference", None) else replace(plain, reference=None)


def _split(parameters: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the parameters of the rotation, then those of the tables."""
    is_rotary = {name: name == "frequencies" for name in parameters}
    return (
        {name: parameters[name] for name in parameters if is_rotary[name]},
        {name: parameters[name] for name in parameters if not is_rotary[name]},
    )
