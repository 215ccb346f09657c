"""Rotary encodings: queries and keys are turned before their product; there are no tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from irpe.core.encodings.protocol import (
    AttentionArguments,
    Encoding,
    HeadSize,
    OnGrid,
    check_splits_head,
)
from irpe.core.positions import Grid
from irpe.core.rotation import axial_rotation, mixed_rotation
from irpe.errors import UserError, UserTypeError


def _check_base(base: float) -> None:
    if isinstance(base, bool) or not isinstance(base, int | float):
        raise UserTypeError(f"base = {base!r} must be a number greater than 1")
    if not 1 < base < math.inf:
        raise UserError(f"base = {base!r} must be a finite number greater than 1")


def _text(base: float) -> str:
    """Returns a text without an exponent that is read back as the same number."""
    return f"{base:f}".rstrip("0").rstrip(".") if float(f"{base:f}") == base else f"{base:.17f}"


class _WithoutTables(Encoding):
    """What a rotation answers where encodings with tables have some: there are none."""

    method = None
    mode = "rotation"
    targets = ""
    keeps_output = False
    takes_rotation = False

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
    """

    base: float = 100.0
    normalized: bool = False

    def __post_init__(self) -> None:
        _check_base(self.base)

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns nothing: the frequencies are fixed."""
        check_splits_head(self, size.head_dim, 2 * size.ndim)
        return {}

    def arguments_on(self, at: OnGrid, parameters: Mapping[str, Any]) -> AttentionArguments:
        """Returns the rotation on a grid."""
        size = at.size
        pairs = size.head_dim // (2 * size.ndim)
        unit = 2 * math.pi if self.normalized else 1.0
        frequencies = tuple(unit * self.base ** (-pair / pairs) for pair in range(pairs))
        dtype = torch.promote_types(at.dtype, torch.float32)
        rotation = axial_rotation(
            at.shape, frequencies, self.normalized, size.num_prefix_tokens, at.device, dtype
        )
        return AttentionArguments(rotation=rotation)

    def __str__(self) -> str:
        return f"rope-axial@{_text(self.base)}" + ("+normalized" if self.normalized else "")


@dataclass(frozen=True)
class RopeMixed(_WithoutTables):
    """Rotary embedding with learned frequencies of both axes for each pair, head and layer.

    They start as in RoPE-ViT: two perpendicular directions, turned at random for each head, with
    lengths base^(-m / M).

    Args:
        base: The ratio of the highest to the lowest initial frequency, nearly.
    """

    base: float = 10.0

    def __post_init__(self) -> None:
        _check_base(self.base)

    def parameter_shapes(self, size: HeadSize) -> dict[str, tuple[int, ...]]:
        """Returns the frequencies: for each axis, head and pair."""
        check_splits_head(self, size.head_dim, 4)
        if size.ndim != 2:
            raise UserError(
                f"{self}: a grid of {size.ndim} axes has no initial frequencies; it takes 2 axes, "
                "'rope-axial' takes any number"
            )
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
        frequencies = parameters["frequencies"]
        rotation = mixed_rotation(at.shape, frequencies, at.size.num_prefix_tokens)
        return AttentionArguments(rotation=rotation)

    def extra_macs(self, shape: Sequence[int], grid: Grid, used_rows: Sequence[int]) -> int:
        """Returns the cost of the angles: the coordinates of tokens times the frequencies."""
        _, heads, tokens, dim = shape
        return grid.ndim * tokens * heads * dim // 2

    def __str__(self) -> str:
        return f"rope-mixed@{_text(self.base)}"
