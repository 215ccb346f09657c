"""timm's patch dropout: which tokens it kept travels with these tokens."""

from collections.abc import Callable
from typing import Any

import torch
from timm.layers import patch_dropout
from timm.layers.patch_dropout import PatchDropout
from torch import Tensor, nn

from irpe.adapters.changes import Undo
from irpe.adapters.following import CarryMark, FollowedGrid
from irpe.adapters.grids import SOURCE, read_mark
from irpe.core.grid import Grid
from irpe.core.places import Points, Subset
from irpe.core.positions import Positions

# In older releases of timm one class returns indices or not.
_WithIndices: Any = getattr(patch_dropout, "PatchDropoutWithIndices", PatchDropout)


class RPEPatchDropout(PatchDropout):
    """timm's PatchDropout, which forgets which tokens it kept; this one marks them."""

    def forward(self, x: Tensor) -> Any:
        """Returns the tokens that are kept, with their indices if it is made for that."""
        tokens, kept = _drop(self, super().forward, x)
        return (tokens, kept) if getattr(self, "return_indices", False) else tokens


class RPEPatchDropoutWithIndices(_WithIndices):
    """timm's PatchDropoutWithIndices, which marks the tokens that it kept."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Returns the tokens that are kept, and which they are."""
        return _drop(self, super().forward, x)


_EQUIPPED: dict[type[nn.Module], type[nn.Module]] = {
    _WithIndices: RPEPatchDropoutWithIndices,
    PatchDropout: RPEPatchDropout,
}


def drops_tokens(vit: nn.Module) -> bool:
    """Tells whether a model drops tokens in training."""
    return isinstance(getattr(vit, "patch_drop", None), tuple(_EQUIPPED))


def keep_indices(vit: Any, source: FollowedGrid) -> Undo:
    """Makes the patch dropout of a model mark the tokens that it keeps."""
    dropout, plain_class = vit.patch_drop, type(vit.patch_drop)
    if plain_class in _EQUIPPED.values():  # since an earlier call of `equip`
        return lambda: None
    vars(dropout)[SOURCE] = source
    dropout.__class__ = _EQUIPPED[plain_class]
    hook = None
    if not isinstance(vit.norm_pre, nn.Identity):
        hook = vit.norm_pre.register_forward_hook(CarryMark())

    def undo() -> None:
        dropout.__class__ = plain_class
        del vars(dropout)[SOURCE]
        if hook is not None:
            hook.remove()

    return undo


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
    source: FollowedGrid = vars(dropout)[SOURCE]
    grid = read_mark(x) or source.use_announced()
    places = Subset(Grid(grid), kept) if isinstance(grid, tuple) else _kept_points(grid, kept)
    positions = Positions(places, None, dropout.num_prefix_tokens)
    source.announce_for(tokens, positions)
    return tokens, kept


def _kept_points(positions: Positions, kept: Tensor) -> Points:
    """Returns those points of each image that are kept."""
    points = positions.queries
    assert isinstance(points, Points)
    return Points(points.coordinates.take_along_dim(kept[..., None], 1))
