"""Rotary positions: pairs of elements of a head are turned by an angle of the position."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from irpe.core.cached import cached_constant
from irpe.core.positions import Grid


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


@cached_constant(maxsize=16)
def axial_rotation(
    shape: tuple[int, ...],
    frequencies: tuple[float, ...],
    normalized: bool,
    num_prefix_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Rotation:
    """Returns the rotation of axial frequencies: each axis turns pairs of its own, in axis order.

    Equal arguments get the same tensors; do not write to them.

    Args:
        shape: The shape of the grid.
        frequencies: The angle for a step of one along an axis, for each of its pairs.
        normalized: Whether an axis runs from -1 to 1 (DINOv3) or counts patches.
        num_prefix_tokens: How many tokens before the patches stay as they are.
        device: Where the tensors are to be.
        dtype: Their dtype.
    """
    grid = Grid(shape)
    positions = normalized_coordinates(grid) if normalized else grid.coordinates().double()
    steps = torch.tensor(frequencies, dtype=torch.float64)
    angles = (positions[:, :, None] * steps).flatten(1)  # positions, axes times pairs of an axis
    angles = torch.cat([angles.new_zeros(num_prefix_tokens, angles.shape[1]), angles])
    cos, sin = (part[None].to(device, dtype) for part in (angles.cos(), angles.sin()))
    return Rotation(cos, sin)


def mixed_rotation(
    shape: tuple[int, ...],
    frequencies: Float[Tensor, "axes heads pairs"],
    num_prefix_tokens: int,
) -> Rotation:
    """Returns the rotation of learned frequencies: every pair turns with all axes.

    Args:
        shape: The shape of the grid.
        frequencies: The angle for a step of one patch along each axis.
        num_prefix_tokens: How many tokens before the patches stay as they are.
    """
    dtype = torch.promote_types(frequencies.dtype, torch.float32)
    positions = _positions(shape, num_prefix_tokens, frequencies.device, dtype)
    angles = torch.einsum("ta,ahp->htp", positions, frequencies.to(dtype))
    return Rotation(angles.cos(), angles.sin())


def normalized_coordinates(grid: Grid) -> Float[Tensor, "positions axes"]:
    """Returns the centres of the patches on axes that run from -1 to 1, in float64."""
    return (grid.coordinates().double() + 0.5) / torch.tensor(grid.shape) * 2 - 1


@cached_constant(maxsize=16)
def _positions(
    shape: tuple[int, ...], num_prefix_tokens: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Returns the coordinates of all tokens; those of prefix tokens are zero: no rotation."""
    patches = Grid(shape).coordinates()
    prefix = patches.new_zeros(num_prefix_tokens, len(shape))
    return torch.cat([prefix, patches]).to(device, dtype)
