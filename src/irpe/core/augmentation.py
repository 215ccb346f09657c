"""Positions that training augments for a rotation: shifted, jittered and rescaled at random."""

import math
from dataclasses import dataclass, fields

from jaxtyping import Float
from torch import Tensor

from irpe.core.numbers import number_text
from irpe.core.positions import Sample
from irpe.errors import UserError, UserTypeError

Coordinates = Float[Tensor, "positions axes"]


@dataclass(frozen=True)
class Augmentation:
    """How far positions may be changed in training, as DINOv3 does; `None` leaves them.

    Args:
        shift: The largest shift of an axis, in units of the coordinates.
        jitter: The largest factor of one axis; 1 over it is the smallest.
        rescale: The largest factor of all axes; 1 over it is the smallest.
    """

    shift: float | None = None
    jitter: float | None = None
    rescale: float | None = None

    def __post_init__(self) -> None:
        for name, value in self.chosen().items():
            least = 0 if name == "shift" else 1
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserTypeError(f"{name} = {value!r} must be a number greater than {least}")
            if not least < value < math.inf:
                raise UserError(f"{name} = {value!r} must be a finite number greater than {least}")

    def chosen(self) -> dict[str, float]:
        """Returns the limits that are set, by name."""
        return {
            field.name: value
            for field in fields(self)
            if (value := getattr(self, field.name)) is not None
        }

    def apply(self, coordinates: Coordinates, sample: Sample) -> Coordinates:
        """Returns the coordinates of one forward pass: shifted, jittered, then rescaled.

        Args:
            coordinates: The coordinates of the tokens.
            sample: The random numbers of the pass, `AugmentedGrid.sample`.
        """
        axes = coordinates.shape[1]
        sample = sample.to(coordinates.device, coordinates.dtype)
        if self.shift is not None:
            coordinates = coordinates + self.shift * sample[1 + axes :]
        if self.jitter is not None:
            coordinates = coordinates * (math.log(self.jitter) * sample[1 : 1 + axes]).exp()
        if self.rescale is not None:
            coordinates = coordinates * (math.log(self.rescale) * sample[0]).exp()
        return coordinates

    def __str__(self) -> str:
        return "".join(f"+{name}{number_text(value)}" for name, value in self.chosen().items())


NONE = Augmentation()
