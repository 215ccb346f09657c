"""Rotary encodings: queries and keys are turned before their product; there are no tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from irpe.core.augmentation import NONE, Augmentation
from irpe.core.cached import cached_constant
from irpe.core.encodings.protocol import (
    AttentionArguments,
    Encoding,
    HeadSize,
    OnGrid,
    check_splits_head,
)
from irpe.core.grid import Grid
from irpe.core.numbers import number_text
from irpe.core.rotation import (
    Coordinates,
    Rotation,
    axial_rotation,
    coordinates,
    mixed_rotation,
)
from irpe.errors import UserError, UserTypeError


@dataclass(frozen=True)
class Rotary(Encoding):
    """What rotary encodings have in common: a base, a reference grid and no tables."""

    base: float
    reference: tuple[int, ...] | None = None
    augmentation: Augmentation = NONE
    method = None
    mode = "rotation"
    targets = ""
    keeps_output = False
    takes_rotation = False

    def __post_init__(self) -> None:
        if isinstance(self.base, bool) or not isinstance(self.base, int | float):
            raise UserTypeError(f"base = {self.base!r} must be a number greater than 1")
        if not 1 < self.base < math.inf:
            raise UserError(f"base = {self.base!r} must be a finite number greater than 1")
        if self.reference is not None:
            Grid.of(self.reference)

    def learned_rows(self, ndim: int) -> tuple[int, ...]:
        """Returns no table rows."""
        return ()

    def reference_on(self, ndim: int) -> tuple[int, ...] | None:
        """Returns the reference grid; one size is for all axes."""
        if self.reference is None or len(self.reference) == ndim:
            return self.reference
        if len(self.reference) == 1:
            return self.reference * ndim
        raise UserError(
            f"{self}: its reference grid has {len(self.reference)} axes, and the grid has {ndim}: "
            "write a size for each axis, or one for all"
        )

    def _options(self) -> str:
        reference = "" if self.reference is None else f"+ref{'x'.join(map(str, self.reference))}"
        return f"{reference}{self.augmentation}"


@dataclass(frozen=True)
class RopeAxial(Rotary):
    """Rotary embedding with fixed frequencies, an equal part of a head for each axis.

    The score is R(q_i) . R(k_j), where R turns pair m of an axis by position * base^(-m / M), M
    pairs an axis. Prefix tokens are not turned.

    Args:
        base: The ratio of the highest to the lowest frequency, nearly.
        reference: The grid that the angles are for, a size for each axis or one for all: positions
            are multiplied by reference / n on an axis of n, so that every grid spans the same.
        augmentation: How positions change at random in training.
        normalized: As DINOv3: an axis runs from -1 to 1 whatever the size of the grid, and
            frequencies count full turns.
    """

    base: float = 100.0
    normalized: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference is not None and self.normalized:
            raise UserError(
                "rope-axial+normalized with a reference grid: an axis runs from -1 to 1 on "
                "every grid already; leave one of them out"
            )

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns nothing: the frequencies are fixed."""
        self.reference_on(size.ndim)
        check_splits_head(self, size.head_dim, 2 * size.ndim)
        return {}

    def arguments_on(self, at: OnGrid, parameters: Mapping[str, Any]) -> AttentionArguments:
        """Returns the rotation on a grid."""
        size, dtype = at.size, torch.promote_types(at.dtype, torch.float32)
        if at.sample is None:
            rotation = _axial_rotation_on(self, at.shape, size, at.device, dtype)
        else:
            positions = _coordinates_on(self, at.shape, at.device, dtype)
            positions = self.augmentation.apply(positions, at.sample)
            frequencies = _axial_frequencies(self, size, at.device, dtype)
            rotation = axial_rotation(positions, frequencies, size.num_prefix_tokens)
        return AttentionArguments(rotation=rotation)

    def __str__(self) -> str:
        normalized = "+normalized" if self.normalized else ""
        return f"rope-axial@{number_text(self.base)}{normalized}{self._options()}"


@dataclass(frozen=True)
class RopeMixed(Rotary):
    """Rotary embedding with learned frequencies of both axes for each pair, head and layer.

    They start as in RoPE-ViT: two perpendicular directions, turned at random for each head, with
    lengths base^(-m / M).

    Args:
        base: The ratio of the highest to the lowest initial frequency, nearly.
        reference: As of `RopeAxial`.
        augmentation: How positions change at random in training.
    """

    base: float = 10.0

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns the frequencies: for each axis, head and pair."""
        check_splits_head(self, size.head_dim, 4)
        if size.ndim != 2:
            raise UserError(
                f"{self}: a grid of {size.ndim} axes has no initial frequencies; it takes 2 axes, "
                "'rope-axial' takes any number"
            )
        self.reference_on(size.ndim)
        return {"frequencies": (2, size.num_heads, size.head_dim // 2)}

    def initialize(self, parameters: Mapping[str, Tensor]) -> None:
        """Sets the frequencies to their initial values, at random."""
        frequencies = parameters["frequencies"]
        _, heads, pairs = frequencies.shape
        steps = torch.arange(pairs // 2, device=frequencies.device) / (pairs // 2)
        lengths = (self.base**-steps).repeat(2)
        quarter_turn = (torch.arange(pairs, device=frequencies.device) >= pairs // 2) * math.pi / 2
        angles = torch.rand(heads, 1, device=frequencies.device) * 2 * math.pi + quarter_turn
        with torch.no_grad():
            frequencies.copy_(torch.stack([lengths * angles.sin(), lengths * angles.cos()]))

    def arguments_on(self, at: OnGrid, parameters: Mapping[str, Any]) -> AttentionArguments:
        """Returns the rotation on a grid."""
        frequencies: Tensor = parameters["frequencies"]
        dtype = torch.promote_types(frequencies.dtype, torch.float32)
        positions = _coordinates_on(self, at.shape, frequencies.device, dtype)
        if at.sample is not None:
            positions = self.augmentation.apply(positions, at.sample)
        rotation = mixed_rotation(positions, frequencies, at.size.num_prefix_tokens)
        return AttentionArguments(rotation=rotation)

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns the cost of the angles: the coordinates of tokens times the frequencies."""
        _, heads, tokens, dim = shape
        return grid.ndim * tokens * heads * dim // 2

    def __str__(self) -> str:
        return f"rope-mixed@{number_text(self.base)}{self._options()}"


# Constants of an encoding as a whole: a compiler that keeps sizes open takes none of its numbers.


@cached_constant(maxsize=16)
def _axial_rotation_on(
    encoding: RopeAxial,
    shape: tuple[int, ...],
    size: HeadSize,
    device: torch.device,
    dtype: torch.dtype,
) -> Rotation:
    positions = _coordinates_on(encoding, shape, torch.device("cpu"), torch.float64)
    frequencies = _axial_frequencies(encoding, size, positions.device, positions.dtype)
    rotation = axial_rotation(positions, frequencies, size.num_prefix_tokens)
    return Rotation(*(part.to(device, dtype) for part in rotation))


@cached_constant(maxsize=16)
def _coordinates_on(
    encoding: Rotary, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Coordinates:
    normalized = isinstance(encoding, RopeAxial) and encoding.normalized
    positions = coordinates(shape, normalized, encoding.reference_on(len(shape)))
    return positions.to(device, dtype)


@cached_constant(maxsize=16)
def _axial_frequencies(
    encoding: RopeAxial, size: HeadSize, device: torch.device, dtype: torch.dtype
) -> Tensor:
    pairs = size.head_dim // (2 * size.ndim)
    unit = 2 * math.pi if encoding.normalized else 1.0
    frequencies = [unit * encoding.base ** (-pair / pairs) for pair in range(pairs)]
    return torch.tensor(frequencies, dtype=torch.float64).to(device, dtype)


def is_trained_as(encoding: Encoding, other: Encoding) -> bool:
    """Returns whether what another encoding learned means the same in this one.

    So it does if they differ in the augmentation alone, or if this one has a reference grid more.
    """
    rotations: list[Any] = [getattr(each, "rotation", each) for each in (encoding, other)]
    if not all(isinstance(each, Rotary) for each in rotations):
        return encoding == other
    one, learned = (replace(each, augmentation=NONE) for each in rotations)
    tables = [getattr(each, "tables", None) for each in (encoding, other)]
    return tables[0] == tables[1] and learned in (one, replace(one, reference=None))
