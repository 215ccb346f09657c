"""Rotary positions: pairs of elements of a head are turned by an angle of the position."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from irpe.core.grid import Grid

Coordinates = Float[Tensor, "positions axes"]


class Rotation(NamedTuple):
    """The cosine and sine of the angle of every token and pair of elements.

    Args:
        cos: For all heads (1) or each head; with a batch axis in front where images differ.
        sin: Likewise.
    """

    cos: Float[Tensor, "*#batch #heads tokens pairs"]
    sin: Float[Tensor, "*#batch #heads tokens pairs"]

    def at(self, tokens: Int[Tensor, "*batch chosen"]) -> "Rotation":
        """Returns the rotation of some tokens in an order, for all images or for each."""
        cos, sin = (part[:, tokens] for part in self)  # heads *batch chosen pairs
        if tokens.ndim == 2:
            cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
        return Rotation(cos, sin)


def rotate(
    x: Float[Tensor, "batch heads tokens dim"], rotation: Rotation
) -> Float[Tensor, "batch heads tokens dim"]:
    """Returns queries or keys, turned; elements 2i and 2i + 1 of a head are a pair.

    The product of a query and a key that are both turned depends on the difference of their angles
    alone. Computed in the precision of the rotation, rounded once.
    """
    even, odd = x.to(rotation.cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotation.cos, rotation.sin  # torch 2.12 does not compile unpacking a constant
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1)
    return turned.flatten(-2).to(x.dtype)


def axial_rotation(
    positions: Coordinates, frequencies: Float[Tensor, " pairs"], num_prefix_tokens: int
) -> Rotation:
    """Returns the rotation of axial frequencies: each axis turns pairs of its own, in axis order.

    Args:
        positions: The coordinates of the tokens after the prefix tokens.
        frequencies: The angle for a step of one along an axis, for each of its pairs.
        num_prefix_tokens: How many tokens before these stay as they are.
    """
    angles = (positions[:, :, None] * frequencies).flatten(1)  # positions, axes times pairs
    angles = _after_prefix(angles, num_prefix_tokens)[None]
    return Rotation(angles.cos(), angles.sin())


def mixed_rotation(
    positions: Coordinates,
    frequencies: Float[Tensor, "axes heads pairs"],
    num_prefix_tokens: int,
) -> Rotation:
    """Returns the rotation of learned frequencies: every pair turns with all axes.

    Args:
        positions: The coordinates of the tokens after the prefix tokens.
        frequencies: The angle for a step of one along each axis.
        num_prefix_tokens: How many tokens before these stay as they are.
    """
    positions = _after_prefix(positions, num_prefix_tokens)
    angles = torch.einsum("ta,ahp->htp", positions, frequencies.to(positions.dtype))
    return Rotation(angles.cos(), angles.sin())


def coordinates(
    shape: tuple[int, ...], normalized: bool, reference: tuple[int, ...] | None
) -> Coordinates:
    """Returns the coordinates of the patches of a grid.

    Args:
        shape: The shape of the grid.
        normalized: Whether an axis runs from -1 to 1 (DINOv3) or counts patches.
        reference: The grid that this one is scaled to; `None` for none.
    """
    positions, size = Grid(shape).coordinates().double(), torch.tensor(shape).double()
    if normalized:
        return (positions + 0.5) / size * 2 - 1
    return positions if reference is None else positions * (torch.tensor(reference) / size)


def _after_prefix(values: Tensor, num_prefix_tokens: int) -> Tensor:
    """Returns values of all tokens; those of prefix tokens are zero: no rotation."""
    return torch.cat([values.new_zeros(num_prefix_tokens, values.size(1)), values])
