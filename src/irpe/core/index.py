"""Index functions: many-to-one maps from a relative distance to a bucket (Eq. 9 and 18)."""

import math
from dataclasses import dataclass, fields

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from irpe.errors import UserError, UserTypeError


@dataclass(frozen=True)
class Piecewise:
    """The paper's g(x), Eq. 18: exact up to alpha, then logarithmic, bounded by beta.

    Args:
        alpha: Up to this distance every integer has a bucket of its own.
        beta: The largest index before rounding down; sets the slope of the logarithm.
        gamma: The distance at which the index reaches beta.

    Examples:
        >>> import irpe, torch
        >>> irpe.Piecewise.from_ratio(1.9)(torch.tensor([0, 1, 2, 4, 13]))
        tensor([0, 1, 2, 3, 3])
    """

    alpha: float
    beta: float
    gamma: float

    def __post_init__(self) -> None:
        _check_numbers(self)
        if not 0 < self.alpha < self.beta < self.gamma:
            raise UserError(
                f"{self!r} is not a piecewise index: 0 < alpha < beta < gamma must hold; "
                "Piecewise.from_ratio(r) gives r, 2r, 8r"
            )

    @classmethod
    def from_ratio(cls, ratio: float) -> "Piecewise":
        """Returns the paper's alpha : beta : gamma = 1 : 2 : 8, scaled by `ratio`."""
        return cls(ratio, 2 * ratio, 8 * ratio)

    @property
    def max_index(self) -> int:
        """The largest index; the smallest is its negative."""
        return math.floor(self.beta)

    @property
    def saturation(self) -> float:
        """The distance from which on the index is `max_index`."""
        return self.gamma

    def __call__(self, distance: Shaped[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Returns g(distance), computed in float64, rounding halves to even."""
        x = _as_float64(distance)
        beyond = x.abs().clamp(min=self.alpha)  # the logarithm is only used where |x| > alpha
        slope = (self.beta - self.alpha) / math.log(self.gamma / self.alpha)
        far = x.sign() * (self.alpha + torch.log(beyond / self.alpha) * slope).round()
        index = torch.where(x.abs() <= self.alpha, x.round(), far)
        return index.clamp(-self.max_index, self.max_index).long()

    def __str__(self) -> str:
        if self == Piecewise.from_ratio(self.alpha):
            return _number(self.alpha)
        return ":".join(_number(value) for value in (self.alpha, self.beta, self.gamma))


@dataclass(frozen=True)
class Clip:
    """Shaw's h(x), Eq. 9: the rounded distance, clipped to beta.

    Args:
        beta: The largest distance that is told apart from longer ones.

    Examples:
        >>> import irpe, torch
        >>> irpe.Clip(2)(torch.tensor([-5, -1, 0, 3]))
        tensor([-2, -1,  0,  2])
    """

    beta: float

    def __post_init__(self) -> None:
        _check_numbers(self)
        if self.beta <= 0:
            raise UserError(f"{self!r} is not a clip index: beta must be greater than 0")

    @property
    def max_index(self) -> int:
        """The largest index; the smallest is its negative."""
        return math.floor(self.beta)

    @property
    def saturation(self) -> float:
        """The distance from which on the index is `max_index`."""
        return self.beta

    def __call__(self, distance: Shaped[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Returns h(distance), rounding halves to even."""
        return _as_float64(distance).round().clamp(-self.max_index, self.max_index).long()

    def __str__(self) -> str:
        return f"clip{_number(self.beta)}"


@dataclass(frozen=True)
class Cut:
    """The rounded distance up to a threshold, and one index for all distances beyond it.

    Args:
        threshold: The largest distance that is told apart.
    """

    threshold: int

    @property
    def max_index(self) -> int:
        """The largest index, that of everything beyond; the smallest is -threshold."""
        return self.threshold + 1

    @property
    def saturation(self) -> float:
        """The distance from which on the index is `max_index`."""
        return float(self.threshold + 1)

    def __call__(self, distance: Shaped[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Returns the index, rounding halves to even."""
        rounded = _as_float64(distance).round()
        return rounded.where(rounded.abs() <= self.threshold, float(self.max_index)).long()


Index = Piecewise | Clip | Cut


def parse_index(text: str) -> Piecewise | Clip:
    """Returns the index that `str(index)` printed: RATIO, ALPHA:BETA:GAMMA or clipBETA."""
    is_clip = text.startswith("clip")
    try:
        numbers = [float(part) for part in text.removeprefix("clip").split(":")]
    except ValueError:
        numbers = []
    match is_clip, numbers:
        case False, [ratio]:
            return Piecewise.from_ratio(ratio)
        case False, [alpha, beta, gamma]:
            return Piecewise(alpha, beta, gamma)
        case True, [beta]:
            return Clip(beta)
        case _:
            raise UserError(
                f"index {text!r} is not understood: write a ratio (1.9), alpha:beta:gamma "
                "(1.9:3.8:15.2) or clip and beta (clip3)"
            )


def _check_numbers(index: Piecewise | Clip) -> None:
    for field in fields(index):
        value = getattr(index, field.name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserTypeError(f"{field.name} = {value!r} is not a number: pass a positive number")
        if not math.isfinite(value):
            raise UserError(f"{field.name} = {value!r} must be finite and greater than 0")
        object.__setattr__(index, field.name, float(value))


def _as_float64(distance: Tensor) -> Tensor:
    x = distance.double()
    if not x.is_meta and not bool(x.isfinite().all()):
        raise UserError("distances must be finite; found NaN or infinity: check the offsets")
    return x


def _number(value: float) -> str:
    short = f"{value:g}"
    return short if float(short) == value else repr(value)
