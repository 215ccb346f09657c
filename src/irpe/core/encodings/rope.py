"""Rotary encodings: queries and keys are turned before their product; there are no tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from irpe.core.augmentation import NONE, Augmentation
from irpe.core.encodings.protocol import AttentionArguments, HeadSize, check_splits_head
from irpe.core.numbers import number_text
from irpe.core.positions import Grid, Sample
from irpe.core.rotation import Frame, augmented_axial_rotation, axial_rotation, mixed_rotation
from irpe.errors import UserError, UserTypeError


def _check_base(base: float) -> None:
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise UserTypeError(f"base = {base!r} must be a number greater than 1")
    if not 1 < base < math.inf:
        raise UserError(f"base = {base!r} must be a finite number greater than 1")


def _check_reference(reference: tuple[int, ...] | None) -> None:
    if reference is not None:
        Grid.of(reference)


def _frame_on(encoding: "RopeAxial | RopeMixed", ndim: int) -> Frame:
    """Returns the coordinates on a grid of some axes; one size of a reference is for all axes."""
    normalized = isinstance(encoding, RopeAxial) and encoding.normalized
    reference = encoding.reference
    if reference is not None and len(reference) == 1:
        reference = reference * ndim
    if reference is not None and len(reference) != ndim:
        raise UserError(
            f"{encoding}: its reference grid has {len(reference)} axes, and the grid has {ndim}: "
            "write a size for each axis, or one for all"
        )
    return Frame(normalized, reference)


def _options(encoding: "RopeAxial | RopeMixed") -> str:
    """Returns the text of the reference grid and of the augmentation."""
    reference = encoding.reference
    text = "" if reference is None else f"+ref{'x'.join(map(str, reference))}"
    return f"{text}{encoding.augmentation}"


class _WithoutTables:
    """What a rotation answers where encodings with tables have some: there are none."""

    method: ClassVar[None] = None
    mode: ClassVar[str] = "rotation"
    targets: ClassVar[str] = ""
    keeps_output: ClassVar[bool] = False
    any_positions: ClassVar[bool] = False

    def index_on(self, grid: Grid) -> None:
        """Returns no index: there is no table to look up."""

    def num_buckets(self, ndim: int, num_prefix_tokens: int) -> tuple[int, ...]:
        """Returns no table rows."""
        return ()

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns 0: turning is elementwise, there is no further product."""
        return 0


@dataclass(frozen=True)
class RopeAxial(_WithoutTables):
    """Rotary embedding with fixed frequencies, an equal part of a head for each axis.

    The score is R(q_i) . R(k_j), where R turns pair m of an axis by position * base^(-m / M), M
    pairs an axis. Prefix tokens are not turned.

    Args:
        base: The ratio of the highest to the lowest frequency, nearly.
        normalized: As DINOv3: an axis runs from -1 to 1 whatever the size of the grid, and
            frequencies count full turns.
        reference: The grid that the angles are for, a size for each axis or one for all: positions
            are multiplied by reference / n on an axis of n, so that every grid spans the same.
        augmentation: How positions change at random in training.
    """

    base: float = 100.0
    normalized: bool = False
    reference: tuple[int, ...] | None = None
    augmentation: Augmentation = NONE

    def __post_init__(self) -> None:
        _check_base(self.base)
        _check_reference(self.reference)
        if self.normalized and self.reference is not None:
            raise UserError(
                "rope-axial+normalized with a reference grid: an axis runs from -1 to 1 on every "
                "grid already; leave one of them out"
            )

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns nothing: the frequencies are fixed."""
        _frame_on(self, size.ndim)
        check_splits_head(self, size.head_dim, 2 * size.ndim)
        return {}

    def initialize(self, parameters: Mapping[str, Tensor]) -> None:
        """Does nothing: there is nothing to learn."""

    def arguments_on(
        self,
        grid: Grid | Sequence[int],
        parameters: Mapping[str, Tensor],
        size: HeadSize,
        like: Tensor,
        sample: Sample | None = None,
    ) -> AttentionArguments:
        """Returns the rotation on a grid, at positions augmented with a sample if there is one."""
        pairs = size.head_dim // (2 * size.ndim)
        unit = 2 * math.pi if self.normalized else 1.0
        frequencies = tuple(unit * self.base ** (-pair / pairs) for pair in range(pairs))
        on = (grid, frequencies, _frame_on(self, size.ndim), size.num_prefix_tokens, like)
        if sample is None:
            return AttentionArguments(rotation=axial_rotation(*on))
        return AttentionArguments(rotation=augmented_axial_rotation(*on, self.augmentation, sample))

    def __str__(self) -> str:
        normalized = "+normalized" if self.normalized else ""
        return f"rope-axial@{number_text(self.base)}{normalized}{_options(self)}"


@dataclass(frozen=True)
class RopeMixed(_WithoutTables):
    """Rotary embedding with learned frequencies of both axes for each pair, head and layer.

    They start as in RoPE-ViT: two perpendicular directions, turned at random for each head, with
    lengths base^(-m / M).

    Args:
        base: The ratio of the highest to the lowest initial frequency, nearly.
        reference: As of `RopeAxial`.
        augmentation: How positions change at random in training.
    """

    base: float = 10.0
    reference: tuple[int, ...] | None = None
    augmentation: Augmentation = NONE

    def __post_init__(self) -> None:
        _check_base(self.base)
        _check_reference(self.reference)

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns the frequencies: for each axis, head and pair."""
        check_splits_head(self, size.head_dim, 4)
        if size.ndim != 2:
            raise UserError(
                f"{self}: a grid of {size.ndim} axes has no initial frequencies; it takes 2 axes, "
                "'rope-axial' takes any number"
            )
        _frame_on(self, size.ndim)
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

    def arguments_on(
        self,
        grid: Grid | Sequence[int],
        parameters: Mapping[str, Tensor],
        size: HeadSize,
        like: Tensor,
        sample: Sample | None = None,
    ) -> AttentionArguments:
        """Returns the rotation on a grid, at positions augmented with a sample if there is one."""
        frame = _frame_on(self, size.ndim)
        rotation = mixed_rotation(
            grid,
            parameters["frequencies"],
            frame,
            size.num_prefix_tokens,
            self.augmentation,
            sample,
        )
        return AttentionArguments(rotation=rotation)

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns the cost of the angles: the coordinates of tokens times the frequencies."""
        _, heads, tokens, dim = shape
        return grid.ndim * tokens * heads * dim // 2

    def __str__(self) -> str:
        return f"rope-mixed@{number_text(self.base)}{_options(self)}"
