"""transformers' masked autoencoders, ViTMAE and VideoMAE.

Their encoder sees the patches that a mask leaves, other ones for each image; their decoder sees all
of them: those of ViTMAE in their places, those of VideoMAE with the masked ones last.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from irpe.adapters.equipped import Equipment
from irpe.adapters.grids import Embedded, Measure, Measured, MeasuredGrid, source_of
from irpe.adapters.host import Plan, refuse
from irpe.adapters.hosts.transformers.attention_interface import make_site
from irpe.adapters.hosts.transformers.classes import entry_of, modules_of
from irpe.core.grid import Grid
from irpe.core.positions import Positions
from irpe.core.token_sets import Subset
from irpe.errors import UserError


def _image_grid(call: Embedded) -> tuple[int, ...]:
    """Returns the grid of an image of ViTMAE."""
    sizes = zip(call.inputs[0].shape[-2:], call.module.patch_embeddings.patch_size, strict=True)
    return tuple(size // patch for size, patch in sizes)


def _kept_of_image(call: Embedded) -> Measured:
    """Returns which patches ViTMAE keeps: the first in the order that it restores later."""
    tokens, _, restore = call.output
    kept = restore.argsort(1)[:, : tokens.shape[1] - 1]
    return Positions(Subset(Grid(_image_grid(call)), kept), None, 1)


def _video_grid(call: Embedded) -> tuple[int, ...]:
    """Returns the grid of a video: (batch, frames, channels, rows, columns) in tubes."""
    frames, _, rows, columns = call.inputs[0].shape[1:]
    steps = call.module.patch_embeddings.projection.stride
    return tuple(size // step for size, step in zip((frames, rows, columns), steps, strict=True))


def _video_mask(call: Embedded) -> Tensor | None:
    mask = call.inputs[1] if len(call.inputs) > 1 else call.keywords.get("bool_masked_pos")
    if mask is None:
        return None
    count, wanted = mask.shape[-1], math.prod(_video_grid(call))
    if mask.ndim != 2 or count != wanted:
        raise UserError(
            f"bool_masked_pos of shape {tuple(mask.shape)} does not fit a video of {wanted} "
            "patches: it is (batch, patches)"
        )
    return mask


def _kept_of_video(call: Embedded) -> Measured:
    """Returns which patches of a video are not masked, in their order."""
    mask, grid = _video_mask(call), _video_grid(call)
    if mask is None:
        return grid
    order = mask.long().argsort(dim=1, stable=True)
    return Positions(Subset(Grid(grid), order[:, : call.output.shape[1]]))


def _all_of_video(call: Embedded) -> Measured:
    """Returns all patches of a video as the decoder gets them: those that are masked come last."""
    mask, grid = _video_mask(call), _video_grid(call)
    if mask is None:
        return grid
    return Positions(Subset(Grid(grid), mask.long().argsort(dim=1, stable=True)))


@dataclass(frozen=True)
class _Family:
    """Where a masked autoencoder has what an encoding needs.

    Args:
        layer: The name of the class of its blocks.
        attention: The path in a block to its attention.
        encoder: The name of the encoder in the model with a decoder.
        num_prefix_tokens: The tokens before the patches.
        own_grid: From the embeddings to the grid that the model is configured for.
        in_encoder: Returns the positions of the encoder's tokens.
        in_decoder: Returns those of the decoder's.
    """

    layer: str
    attention: str
    encoder: str
    num_prefix_tokens: int
    own_grid: Callable[[Any], tuple[int, ...]]
    in_encoder: Measure
    in_decoder: Measure


def _configured_image(embeddings: Any) -> tuple[int, ...]:
    patches = embeddings.patch_embeddings
    sizes = zip(patches.image_size, patches.patch_size, strict=True)
    return tuple(size // patch for size, patch in sizes)


def _configured_video(embeddings: Any) -> tuple[int, ...]:
    config = embeddings.config
    return (config.num_frames // config.tubelet_size, *_configured_image(embeddings))


_VITMAE = _Family(
    "ViTMAELayer", "attention", "vit", 1, _configured_image, _kept_of_image, _image_grid
)
_VIDEOMAE = _Family(
    "VideoMAELayer",
    "attention.attention",
    "videomae",
    0,
    _configured_video,
    _kept_of_video,
    _all_of_video,
)
_ENCODERS = {"ViTMAEModel": _VITMAE, "VideoMAEModel": _VIDEOMAE}
_WITH_DECODER = {"ViTMAEForPreTraining": _VITMAE, "VideoMAEForPreTraining": _VIDEOMAE}


def add_sites(found: Plan, name: str, module: Any, call: Equipment) -> None:
    """Adds the attentions of an encoder, then those of the decoder after it."""
    family = entry_of(module, _WITH_DECODER)
    if family is not None:
        encoder = getattr(module, family.encoder)
        _add_encoder(found, f"{name}.{family.encoder}".lstrip("."), encoder, family, call)
        path = f"{family.encoder}.embeddings"
        own = family.own_grid(encoder.embeddings)
        count = family.num_prefix_tokens
        made = MeasuredGrid(path, family.in_decoder, count, own, marks_output=False)
        decoder, source = f"{name}.decoder".lstrip("."), source_of(module) or made
        _add_blocks(found, decoder, module.decoder, module, source, family, call)
    family = entry_of(module, _ENCODERS)
    if family is not None and not any(site.name.startswith(f"{name}.") for site in found.sites):
        _add_encoder(found, name, module, family, call)


def _add_encoder(found: Plan, name: str, encoder: Any, family: _Family, call: Equipment) -> None:
    own = family.own_grid(encoder.embeddings)
    made = MeasuredGrid("embeddings", family.in_encoder, family.num_prefix_tokens, own)
    _add_blocks(found, name, encoder, encoder, source_of(encoder) or made, family, call)


def _add_blocks(
    found: Plan,
    name: str,
    owner: Any,
    model: Any,
    source: MeasuredGrid,
    family: _Family,
    call: Equipment,
) -> None:
    """Adds the blocks of an owner, whose grids are measured in a model."""
    blocks = modules_of(owner, family.layer, name)
    name, count = type(owner).__name__, family.num_prefix_tokens
    reasons = {
        "grid": f"{name} knows the grid of each input, by its configuration {source.initial}",
        "num_prefix_tokens": f"{name} has {count} before its patches",
        "absolute": f"the decoder of {name} distinguishes masked patches by its fixed sinusoid",
    }
    check = partial(refuse, call, reasons, grid=source.initial, num_prefix_tokens=count)
    for path, block in blocks.items():
        attention = block.get_submodule(family.attention)
        path = f"{path}.{family.attention}"
        found.sites.append(make_site(path, attention, count, call, source=source, check=check))
    found.changes += source.follow(model, blocks.values())
