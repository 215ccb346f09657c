"""timm's models whose blocks work on the tokens of a patch embedding: ViT, Eva, BEiT, ..."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import timm.models
from timm.layers.attention import Attention, AttentionRope
from timm.models import beit
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos
from torch import nn

from irpe.adapters.changes import (
    Change,
    Undo,
    drop_module,
    drop_parameter,
    put_absolute,
    set_attribute,
)
from irpe.adapters.following import (
    Embedded,
    FollowedGrid,
    ToldGrid,
    follow_grid,
    followed_grid,
)
from irpe.adapters.grids import GridSource
from irpe.adapters.hosts.timm.attending import head_dim_of
from irpe.adapters.hosts.timm.beit import RPEBeitAttention, RPERelPosAttention
from irpe.adapters.hosts.timm.dropping import drops_tokens, keep_indices
from irpe.adapters.hosts.timm.eva import RPEEvaAttention, RPERopeAttention
from irpe.adapters.hosts.timm.vit import RPEViTAttention
from irpe.adapters.plan import Plan, Request, Site, check_grid
from irpe.errors import UserError

# Not in older releases of timm; by module and name.
_NEWER = [
    kind
    for module, name in (("qwen3_vit", "Qwen3VitEncoder"), ("deepseek_vit", "DeepseekVitEncoder"))
    if (kind := getattr(getattr(timm.models, module, None), name, None)) is not None
]
TOKEN_MODELS = (VisionTransformer, Eva, beit.Beit, VisionTransformerRelPos, *_NEWER)
_EQUIPPED: dict[type[nn.Module], type[nn.Module]] = {
    Attention: RPEViTAttention,
    EvaAttention: RPEEvaAttention,
    AttentionRope: RPERopeAttention,
    beit.Attention: RPEBeitAttention,
    RelPosAttention: RPERelPosAttention,
}
_SHARED_BIASES = ("rel_pos_bias", "shared_rel_pos")  # of BEiT and VisionTransformerRelPos


class SetInputSize:
    """Replaces a model's own `set_input_size`, which would make a learned encoding again.

    Args:
        vit: The model.
        absolute: What replaced its absolute encoding: "none" or "sinusoid".
    """

    def __init__(self, vit: Any, absolute: str) -> None:
        self.vit, self.absolute = vit, absolute

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Changes the size of the input."""
        type(self.vit).set_input_size(self.vit, *args, **kwargs)
        _put_absolute(self.vit, self.absolute)


def add_sites(found: Plan, name: str, module: nn.Module, request: Request) -> None:
    """Adds the attentions of a model with blocks, and what else changes in it."""
    if not isinstance(module, TOKEN_MODELS):
        return
    vit: Any = module
    source = _grid_source(vit, request)
    count = request.num_prefix_tokens
    shared = next((each for each in _SHARED_BIASES if getattr(vit, each, None) is not None), None)
    for path, block, attention in attentions_of(vit, name):
        drop = _drop_own_bias(attention)
        site = Site(
            name=path,
            attention=attention,
            equipped_class=equipped_class(attention),
            num_heads=attention.num_heads,
            head_dim=head_dim_of(attention),
            num_prefix_tokens=getattr(vit, "num_prefix_tokens", 0) if count is None else count,
            grid=source,
            changes=drop if request.builtin_bias == "drop" else [],
            block=block,
            block_dim=vit.embed_dim,
            has_builtin_bias=bool(drop) or shared is not None,
            rotates=getattr(vit, "rope", None) is not None,
            check=partial(_check_dropping, vit, request),
            drops_tokens=drops_tokens(vit),
        )
        found.sites.append(site)
    found.changes.append(partial(follow_grid, source, vit.blocks))
    if drops_tokens(vit) and isinstance(source, FollowedGrid):
        found.changes.append(partial(keep_indices, vit, source))
    if shared is not None and request.builtin_bias == "drop":
        _check_all_layers(request)
        found.changes.append(partial(drop_module, vit, shared))
    has_absolute = request.requires_absolute or getattr(vit, "pos_embed", None) is not None
    if request.absolute != "keep" and has_absolute:
        if isinstance(vit, tuple(_NEWER)):
            raise UserError(
                f"absolute {request.absolute!r}: {type(vit).__qualname__} resamples its absolute "
                "encoding from a grid of its own; use 'keep'"
            )
        found.changes.append(partial(_replace_absolute, vit, request.absolute))


def attentions_of(vit: Any, name: str) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yields the path, the block and the attention of all that can be equipped."""
    for index, block in enumerate(vit.blocks):
        for path, attention in block.named_modules(prefix=f"{name}.blocks.{index}".lstrip(".")):
            if isinstance(attention, tuple(_EQUIPPED)):
                yield path, block, attention


def equipped_class(attention: nn.Module) -> type[nn.Module]:
    """Returns the class that an attention gets."""
    return next(equipped for kind, equipped in _EQUIPPED.items() if isinstance(attention, kind))


def _drop_own_bias(attention: Any) -> list[Change]:
    """Returns what drops the relative bias of an attention's own, if it has one."""
    if isinstance(attention, beit.Attention):
        has_bias = attention.relative_position_bias_table is not None
        return [partial(drop_parameter, attention, "relative_position_bias_table")] * has_bias
    if isinstance(attention, RelPosAttention) and attention.rel_pos is not None:
        return [partial(drop_module, attention, "rel_pos")]
    return []


def _check_all_layers(request: Request) -> None:
    if request.layers is not None:
        raise UserError(
            f"builtin_bias 'drop': all layers share one relative bias, so it cannot be dropped in "
            f"layers {list(request.layers)} alone; leave layers out, or use 'keep'"
        )


def _check_dropping(vit: Any, request: Request) -> None:
    """Raises an error for what a model that drops tokens in training cannot have."""
    if not drops_tokens(vit):
        return
    if request.grid is not None:
        raise UserError(
            f"grid {request.grid}: patch_drop keeps some tokens of the grid of each input, which "
            "the model measures; leave grid out"
        )
    own, count = vit.patch_drop.num_prefix_tokens, request.num_prefix_tokens
    if count not in (None, own):
        raise UserError(
            f"num_prefix_tokens {count}: patch_drop keeps the first {own} tokens and drops among "
            "the rest; leave it to the model"
        )


def _grid_source(vit: Any, request: Request) -> GridSource:
    size = vit.patch_embed.grid_size
    if getattr(vit.patch_embed, "strict_img_size", False):
        check_grid(request, size)
    if request.grid is not None and not drops_tokens(vit):
        return ToldGrid(request.grid, vit, "patch_embed", measure_patches)
    return followed_grid(vit) or FollowedGrid(size, vit, "patch_embed", measure_patches)


def measure_patches(call: Embedded) -> tuple[int, ...]:
    """Returns the grid that a patch embedding makes of an image."""
    embedding, (image, *_), output = call.module, call.inputs, call.output
    if output.ndim == 4:  # batch rows columns channels, of models with dynamic_img_size
        return tuple(output.shape[1:3])
    if hasattr(embedding, "dynamic_feat_size"):
        return tuple(embedding.dynamic_feat_size(image.shape[-2:]))
    return tuple(embedding.grid_size)


def _replace_absolute(vit: nn.Module, absolute: str) -> Undo:
    """Replaces the learned encoding by zeros or sinusoids, also after `set_input_size`."""
    undo_values = _put_absolute(vit, absolute)
    undo_method = set_attribute(vit, "set_input_size", SetInputSize(vit, absolute))

    def undo() -> None:
        undo_method()
        undo_values()

    return undo


def _put_absolute(vit: Any, absolute: str) -> Undo:
    return put_absolute(vit, "pos_embed", vit.patch_embed.grid_size, absolute)
