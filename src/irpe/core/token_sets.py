"""Tokens that are not one whole grid: some tokens of one in an order, and points anywhere."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from irpe.core.grid import Coordinates, Grid
from irpe.errors import UserError, UserTypeError


@dataclass(frozen=True, eq=False)
class Subset:
    """Some tokens of a grid in an order: those that a mask or patch dropout kept.

    Args:
        grid: The grid.
        tokens: Their indices on the grid, counted row-major; for all images, or as a tensor of
            (batch, tokens) for each.

    Examples:
        >>> import irpe
        >>> kept = irpe.Positions(irpe.Subset(irpe.Grid((14, 14)), (0, 5, 77)), num_prefix_tokens=1)
        >>> irpe.bucket_maps("product-bias-k", kept)[0].ids.shape
        torch.Size([4, 4])
    """

    grid: Grid
    tokens: tuple[int, ...] | Int[Tensor, "batch tokens"]
    is_real = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", Grid.of(self.grid))
        tokens = (
            self.tokens if isinstance(self.tokens, Tensor) else _to_tensor(self.tokens, self.grid)
        )
        _check_is_integer("tokens", tokens)
        if tokens.ndim not in (1, 2):
            raise UserError(
                f"tokens of shape {tuple(tokens.shape)} are not indices on a grid: pass "
                "(tokens,) for all images or (batch, tokens) for each"
            )
        if not torch.compiler.is_compiling():
            _check_on_grid(tokens, self.grid)
        kept = tokens if tokens.ndim == 2 else tuple(tokens.tolist())
        object.__setattr__(self, "tokens", kept)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.grid.ndim

    @property
    def num_positions(self) -> int:
        """The number of tokens of an image."""
        return self.index().shape[-1]

    @property
    def batch(self) -> int | None:
        """The number of images if they differ."""
        return len(self.tokens) if isinstance(self.tokens, Tensor) else None

    def index(self) -> Int[Tensor, "*batch tokens"]:
        """Returns the indices as a tensor."""
        return self.tokens if isinstance(self.tokens, Tensor) else torch.tensor(self.tokens)

    def places(self) -> Coordinates:
        """Returns the position of every token."""
        index = self.index()
        return self.grid.coordinates().to(index.device)[index]

    def __eq__(self, other: object) -> bool:
        if isinstance(self.tokens, Tensor) or not isinstance(other, Subset):
            return self is other
        return (self.grid, self.tokens) == (other.grid, other.tokens)

    def __hash__(self) -> int:
        return id(self) if isinstance(self.tokens, Tensor) else hash((self.grid, self.tokens))

    def __str__(self) -> str:
        return f"{self.num_positions} tokens of {self.grid}"


@dataclass(frozen=True, eq=False)
class Points:
    """Tokens at coordinates: points, patches of images of several sizes, boxes.

    Args:
        coordinates: (tokens, axes) for all images, or (batch, tokens, axes) for each; integers or
            real.
        is_token: False where an image has padding in the place of a token: (batch, tokens). No
            query attends to padding.
        scale: How many patches a unit of the coordinates is. With coordinates from 0 to 1 and
            scale 14, neighbours on a grid of 14 are 1.0 apart.

    Examples:
        >>> import irpe, torch
        >>> points = irpe.Positions(irpe.Points(torch.rand(96, 2), scale=14))
        >>> irpe.bucket_maps("euclidean-bias-k", points)[0].ids.shape
        torch.Size([96, 96])
    """

    coordinates: Coordinates
    is_token: Bool[Tensor, "batch tokens"] | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        x: object = self.coordinates
        if not isinstance(x, Tensor) or x.dtype == torch.bool or x.is_complex():
            raise UserTypeError(
                f"coordinates {getattr(x, 'dtype', x)!r} must be a tensor of integers or reals"
            )
        if x.ndim not in (2, 3) or 0 in x.shape[-2:]:
            raise UserError(
                f"coordinates of shape {tuple(x.shape)} are not (tokens, axes) or (batch, tokens, "
                "axes), with at least one of each"
            )
        is_real = isinstance(self.scale, int | float) and not isinstance(self.scale, bool)
        if not is_real or not 0 < self.scale < math.inf:
            raise UserError(
                f"scale = {self.scale!r} must be a finite number greater than 0: the patches in a "
                "unit of the coordinates"
            )
        if self.is_token is not None:
            _check_padding(self.is_token, x)
        if not torch.compiler.is_compiling():
            _check_finite(x, self.is_token)

    @classmethod
    def of_grids(cls, shapes: Int[Tensor, "batch axes"], num_tokens: int) -> "Points":
        """Returns the tokens of images with a grid each, row-major, then padding.

        Args:
            shapes: The shape of the grid of each image.
            num_tokens: The tokens of an image with its padding.
        """
        _check_is_integer("shapes", shapes)
        largest = int(shapes.prod(-1).max())
        if shapes.ndim != 2 or int(shapes.min()) < 1 or largest > num_tokens:
            raise UserError(
                f"grids {shapes.tolist()} do not fit images of {num_tokens} tokens: give one "
                "positive integer per axis for each image, with a product of at most that"
            )
        rest = torch.arange(num_tokens, device=shapes.device).expand(len(shapes), -1)
        is_token = rest < shapes.prod(-1, keepdim=True)
        axes: list[Tensor] = []
        for size in reversed(shapes.unbind(-1)):
            axes.append(rest % size[:, None])
            rest = rest // size[:, None]
        return cls(torch.stack(axes[::-1], dim=-1), is_token)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return self.coordinates.shape[-1]

    @property
    def num_positions(self) -> int:
        """The number of tokens of an image, its padding included."""
        return self.coordinates.shape[-2]

    @property
    def batch(self) -> int | None:
        """The number of images if they differ."""
        return len(self.coordinates) if self.coordinates.ndim == 3 else None

    @property
    def is_real(self) -> bool:
        """Whether positions are real numbers, not integers."""
        return self.scale != 1 or self.coordinates.is_floating_point()

    def places(self) -> Coordinates:
        """Returns the position of every token; those of padding mean nothing."""
        places = self.coordinates.detach()
        if self.is_token is not None:
            places = places.masked_fill(~self.is_token[..., None], 0)
        return places.double() * self.scale if self.is_real else places.long()

    def __str__(self) -> str:
        return f"{self.num_positions} points"


def _to_tensor(tokens: Any, grid: Grid) -> Tensor:
    is_sequence = isinstance(tokens, Sequence) and not isinstance(tokens, str)
    if not is_sequence or not all(isinstance(t, int) and not isinstance(t, bool) for t in tokens):
        raise UserTypeError(f"tokens {tokens!r} are not a sequence of integers, on grid {grid}")
    return torch.tensor(tokens, dtype=torch.long)


def _check_is_integer(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise UserTypeError(f"{name} are {tensor.dtype}: pass integers")


def _check_on_grid(tokens: Tensor, grid: Grid) -> None:
    """Raises an error for an index that is not on the grid, or there twice."""
    last = grid.num_positions - 1
    if tokens.numel() == 0:
        raise UserError(f"tokens are empty: pass at least one index from 0 to {last}")
    outside = tokens[(tokens < 0) | (tokens > last)]
    if outside.numel():
        raise UserError(
            f"token {int(outside[0])} is not on grid {grid}: its tokens are 0 to {last}, counted "
            "row-major, without prefix tokens"
        )
    ordered = tokens.sort(dim=-1).values
    repeated = ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]]
    if repeated.numel():
        raise UserError(
            f"token {int(repeated[0])} of grid {grid} occurs twice: each token of a subset occurs "
            "once; tokens that share a position are Points"
        )


def _check_padding(is_token: Tensor, coordinates: Tensor) -> None:
    shape = tuple(coordinates.shape[:-1])
    if coordinates.ndim != 3 or is_token.dtype != torch.bool or tuple(is_token.shape) != shape:
        raise UserError(
            f"is_token of shape {tuple(is_token.shape)}, {is_token.dtype} does not fit coordinates "
            f"of shape {tuple(coordinates.shape)}: it is boolean, (batch, tokens), False where "
            "there is padding"
        )


def _check_finite(coordinates: Tensor, is_token: Tensor | None) -> None:
    """Raises an error for a token without a position, or an image without a token."""
    if is_token is not None and not bool(is_token.any(-1).all()):
        image = int((~is_token.any(-1)).nonzero()[0])
        raise UserError(f"image {image} has no tokens, padding alone: leave it out of the batch")
    is_lost = ~coordinates.isfinite().all(-1)
    is_lost = is_lost if is_token is None else is_lost & is_token
    if bool(is_lost.any()):
        where = is_lost.nonzero()[0].tolist()
        raise UserError(
            f"coordinates {coordinates[tuple(where)].tolist()} of token {where} are not finite: "
            "every token needs a position; mark padding with is_token"
        )
