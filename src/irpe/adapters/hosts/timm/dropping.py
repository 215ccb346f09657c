"""timm's patch dropout: which tokens it kept travels with these tokens."""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers.patch_dropout import PatchDropout, PatchDropoutWithIndices
from torch import Tensor, nn

from irpe.adapters.grids import (
    SOURCE,
    CarryMark,
    MeasuredGrid,
    read_mark,
    source_of,
    without_sample,
)
from irpe.adapters.swaps import Swap, add_hook, set_attribute, set_class
from irpe.core.grid import Grid
from irpe.core.positions import AugmentedGrid, Positions
from irpe.core.token_sets import Points, Subset


class RPEPatchDropout(PatchDropout):
    """timm's PatchDropout, which forgets which tokens it kept; this one marks them."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns the tokens that are kept."""
        return _drop(self, super().forward, x)[0]


class RPEPatchDropoutWithIndices(PatchDropoutWithIndices):
    """timm's PatchDropoutWithIndices, which marks the tokens that it kept."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the tokens that are kept, and which they are."""
        return _drop(self, super().forward, x)


_EQUIPPED: dict[type[nn.Module], type[nn.Module]] = {
    PatchDropoutWithIndices: RPEPatchDropoutWithIndices,
    PatchDropout: RPEPatchDropout,
}


def drops_tokens(vit: nn.Module) -> bool:
    """Tells whether a model drops tokens in training."""
    return isinstance(getattr(vit, "patch_drop", None), tuple(_EQUIPPED))


def keep_indices(vit: Any, source: MeasuredGrid) -> list[Swap]:
    """Returns what makes the patch dropout of a model mark the tokens that it keeps."""
    dropout = vit.patch_drop
    if source_of(dropout) is not None:  # since an earlier call of `equip`
        return []
    swaps = set_attribute(dropout, SOURCE, source) + set_class(dropout, _EQUIPPED[type(dropout)])
    if not isinstance(vit.norm_pre, nn.Identity):
        swaps += add_hook(vit.norm_pre, CarryMark())
    return swaps


def _drop(
    dropout: Any, forward: Callable[[Tensor], Any], x: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Returns the tokens that are kept, marked with their positions, and which they are.

    timm's own forward is given the indices of the tokens in the place of the tokens.
    """
    if not dropout.training or dropout.prob == 0:
        return x, None
    index = torch.arange(x.shape[1], device=x.device).expand(x.shape[0], -1)[..., None]
    found = forward(index)
    index = found[0] if isinstance(found, tuple) else found  # batch tokens 1
    tokens = x.gather(1, index.expand(-1, -1, x.shape[2]))
    kept = index[:, dropout.num_prefix_tokens :, 0] - dropout.num_prefix_tokens
    source: Any = source_of(dropout)
    grid = read_mark(x) or source.of_attention(x)
    whole = without_sample(grid)
    places = Subset(Grid(whole), kept) if isinstance(whole, tuple) else _kept_points(whole, kept)
    positions = Positions(places, None, dropout.num_prefix_tokens)
    if isinstance(grid, AugmentedGrid):
        source.mark_positions(tokens, AugmentedGrid(positions, grid.sample))
    else:
        source.mark_positions(tokens, positions)
    return tokens, kept


def _kept_points(positions: Positions, kept: Tensor) -> Points:
    """Returns those points of each image that are kept."""
    points = positions.queries
    assert isinstance(points, Points)
    return Points(points.coordinates.take_along_dim(kept[..., None], 1))
