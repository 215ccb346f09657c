"""timm's NaFlexVit: images of several shapes in one batch, each patch with its coordinates."""

from functools import partial
from typing import Any

from torch import nn

from irpe.adapters.changes import Undo
from irpe.adapters.following import (
    CarryMark,
    Embedded,
    FollowedGrid,
    follow_grid,
    followed_grid,
)
from irpe.adapters.grids import InputGrid
from irpe.adapters.hosts.timm.attending import head_dim_of
from irpe.adapters.hosts.timm.dropping import drops_tokens, keep_indices
from irpe.adapters.hosts.timm.tokens import attentions_of, equipped_class
from irpe.adapters.plan import Plan, Request, Site
from irpe.core.places import Points
from irpe.core.positions import Positions
from irpe.errors import UserError

try:
    from timm.models.naflexvit import NaFlexVit
except ImportError:  # not in older releases of timm
    NaFlexVit = None


def add_sites(found: Plan, name: str, module: nn.Module, request: Request) -> None:
    """Adds the attentions of a model that takes images of several shapes."""
    if NaFlexVit is None or not isinstance(module, NaFlexVit):
        return
    vit: Any = module
    source = followed_grid(vit) or FollowedGrid(None, vit, "embeds", _measure)
    for path, _, attention in attentions_of(vit, name):
        site = Site(
            name=path,
            attention=attention,
            equipped_class=equipped_class(attention),
            num_heads=attention.num_heads,
            head_dim=head_dim_of(attention),
            num_prefix_tokens=vit.num_prefix_tokens,
            grid=source,
            check=partial(_check, vit, request),
            rotates=vit.rope is not None,
        )
        found.sites.append(site)
    found.changes.append(partial(follow_grid, source, vit.blocks))
    if drops_tokens(vit):
        found.changes.append(partial(keep_indices, vit, source))
    elif not isinstance(vit.norm_pre, nn.Identity):
        found.changes.append(partial(_carry_mark, vit.norm_pre))


def _carry_mark(module: nn.Module) -> Undo:
    return module.register_forward_hook(CarryMark()).remove


def _measure(call: Embedded) -> InputGrid:
    """Returns the grid of images, or the coordinates of patches; the host masks the padding."""
    coordinates = call.keywords.get("patch_coord")
    if coordinates is None:
        return tuple(call.output[1])
    return Positions(Points(coordinates), None, call.module.num_prefix_tokens)


def _check(vit: Any, request: Request) -> None:
    if request.grid is not None:
        raise UserError(
            f"grid {request.grid}: NaFlexVit is given the coordinates of each patch; leave grid out"
        )
    if request.num_prefix_tokens not in (None, vit.num_prefix_tokens):
        raise UserError(
            f"num_prefix_tokens {request.num_prefix_tokens}: NaFlexVit has "
            f"{vit.num_prefix_tokens} before its patches; leave it to the model"
        )
    if request.absolute != "keep":
        raise UserError(
            f"absolute {request.absolute!r}: NaFlexVit resamples its absolute encoding for each "
            "image; use 'keep'"
        )
