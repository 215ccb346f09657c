"""Rotary positions: pairs of elements of a head are turned by an angle of the position."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from irpe.core.augmentation import Augmentation
from irpe.core.cached import built_once, traced_as_constant
from irpe.core.positions import Grid, Sample, grid_shape


class Frame(NamedTuple):
    """What the coordinates of a rotation are.

    Args:
        normalized: Whether an axis runs from -1 to 1 (DINOv3) or counts patches.
        reference: The grid that a grid of another size is scaled to; `None` for none.
    """

    normalized: bool = False
    reference: tuple[int, ...] | None = None


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
    grid: Grid | Sequence[int],
    frequencies: tuple[float, ...],
    frame: Frame,
    num_prefix_tokens: int,
    like: Tensor,
) -> Rotation:
    """Returns the rotation of axial frequencies: each axis turns pairs of its own, in axis order.

    Equal arguments get the same tensors; do not write to them.

    Args:
        grid: The shape of the grid.
        frequencies: The angle for a step of one along an axis, for each of its pairs.
        frame: What a step of one is.
        num_prefix_tokens: How many tokens before the patches stay as they are.
        like: A tensor with the device and the precision wanted, at least float32.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    return _constant_rotation(
        grid_shape(grid), frequencies, tuple(frame), num_prefix_tokens, like.device, dtype
    )


def augmented_axial_rotation(
    grid: Grid | Sequence[int],
    frequencies: tuple[float, ...],
    frame: Frame,
    num_prefix_tokens: int,
    like: Tensor,
    augmentation: Augmentation,
    sample: Sample,
) -> Rotation:
    """Returns the rotation of axial frequencies at augmented positions.

    Args:
        grid: The shape of the grid.
        frequencies: As in `axial_rotation`; so the next three.
        frame: See there.
        num_prefix_tokens: See there.
        like: See there.
        augmentation: How far positions may be changed.
        sample: The random numbers of the forward pass.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    positions = _constant_positions(grid_shape(grid), tuple(frame), like.device, dtype)
    positions = _with_prefix(augmentation.apply(positions, sample), num_prefix_tokens)
    steps = _constant_steps(frequencies, like.device, dtype)
    angles = (positions[:, :, None] * steps).flatten(1)[None]
    return Rotation(angles.cos(), angles.sin())


def mixed_rotation(
    grid: Grid | Sequence[int],
    frequencies: Float[Tensor, "axes heads pairs"],
    frame: Frame,
    num_prefix_tokens: int,
    augmentation: Augmentation,
    sample: Sample | None = None,
) -> Rotation:
    """Returns the rotation of learned frequencies: every pair turns with all axes.

    Args:
        grid: The shape of the grid.
        frequencies: The angle for a step of one along each axis.
        frame: What a step of one is.
        num_prefix_tokens: How many tokens before the patches stay as they are.
        augmentation: How far positions may be changed.
        sample: The random numbers of the forward pass; `None` to change none.
    """
    dtype = torch.promote_types(frequencies.dtype, torch.float32)
    shape, device = grid_shape(grid), frequencies.device
    positions = _constant_positions(shape, tuple(frame), device, dtype)
    if sample is not None:
        positions = augmentation.apply(positions, sample)
    positions = _with_prefix(positions, num_prefix_tokens)
    angles = torch.einsum("ta,ahp->htp", positions, frequencies.to(dtype))
    return Rotation(angles.cos(), angles.sin())


def coordinates_in(frame: Frame, grid: Grid) -> Float[Tensor, "positions axes"]:
    """Returns the positions of the patches of a grid, in float64."""
    positions = grid.coordinates().double()
    shape = torch.tensor(grid.shape, dtype=torch.float64)
    if frame.normalized:
        return (positions + 0.5) / shape * 2 - 1
    if frame.reference is None:
        return positions
    return positions * (torch.tensor(frame.reference) / shape)  # 1 where they are equal


def _with_prefix(positions: Tensor, num_prefix_tokens: int) -> Tensor:
    """Returns the coordinates of all tokens; those of prefix tokens are zero: no rotation."""
    prefix = positions.new_zeros(num_prefix_tokens, positions.shape[1])
    return torch.cat([prefix, positions])


@traced_as_constant
def _constant_rotation(
    shape: tuple[int, ...],
    frequencies: tuple[float, ...],
    frame: tuple[Any, ...],
    num_prefix_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Rotation:
    grid = Grid.of(shape)
    return _cached_rotation(grid, frequencies, Frame(*frame), num_prefix_tokens, device, dtype)


@built_once(maxsize=16)
def _cached_rotation(
    grid: Grid,
    frequencies: tuple[float, ...],
    frame: Frame,
    num_prefix_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Rotation:
    positions = coordinates_in(frame, grid)
    steps = torch.tensor(frequencies, dtype=torch.float64)
    angles = (positions[:, :, None] * steps).flatten(1)  # positions, axes times pairs of an axis
    angles = _with_prefix(angles, num_prefix_tokens)
    cos, sin = (part[None].to(device, dtype) for part in (angles.cos(), angles.sin()))
    return Rotation(cos, sin)


@traced_as_constant
def _constant_positions(
    shape: tuple[int, ...], frame: tuple[Any, ...], device: torch.device, dtype: torch.dtype
) -> Tensor:
    return _cached_positions(Grid.of(shape), Frame(*frame), device, dtype)


@built_once(maxsize=16)
def _cached_positions(grid: Grid, frame: Frame, device: torch.device, dtype: torch.dtype) -> Tensor:
    return coordinates_in(frame, grid).to(device, dtype)


@traced_as_constant
def _constant_steps(
    frequencies: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> Tensor:
    return _cached_steps(frequencies, device, dtype)


@built_once(maxsize=16)
def _cached_steps(
    frequencies: tuple[float, ...], device: torch.device, dtype: torch.dtype
) -> Tensor:
    return torch.tensor(frequencies, dtype=torch.float64).to(device, dtype)
