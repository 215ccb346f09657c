"""timm's models: where their grids and their absolute encodings are."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from timm.layers.attention import Attention, AttentionRope
from timm.models import beit, mvitv2, volo
from timm.models.deepseek_vit import DeepseekVitEncoder
from timm.models.eva import Eva, EvaAttention
from timm.models.naflexvit import NaFlexVit
from timm.models.qwen3_vit import Qwen3VitEncoder
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos
from timm.models.vision_transformer_sam import VisionTransformerSAM
from torch import nn

from irpe.adapters.equipped import Equipment
from irpe.adapters.grids import (
    SOURCE,
    CarryMark,
    Embedded,
    Measured,
    MeasuredGrid,
    source_of,
)
from irpe.adapters.host import (
    Plan,
    change_absolute,
    check_grid,
    refuse,
    site_of,
)
from irpe.adapters.hosts import row_of
from irpe.adapters.hosts.timm.dropping import drops_tokens, keep_indices
from irpe.adapters.hosts.timm.rows import size_of
from irpe.adapters.swaps import add_hook, apply_change, put_absolute, put_module, set_attribute
from irpe.core.positions import Positions
from irpe.core.token_sets import Points
from irpe.errors import UserError

_RESAMPLING = (Qwen3VitEncoder, DeepseekVitEncoder)  # their absolute encoding, for each image
TOKEN_MODELS = (VisionTransformer, Eva, beit.Beit, VisionTransformerRelPos, *_RESAMPLING)
_ON_TOKENS = (Attention, EvaAttention, AttentionRope, beit.Attention, RelPosAttention)
_SHARED_BIASES = ("rel_pos_bias", "shared_rel_pos")  # of BEiT and VisionTransformerRelPos


_DROPPING = {
    "grid": "patch_drop keeps some tokens of the grid of each input, which the model measures",
    "num_prefix_tokens": "patch_drop keeps the first tokens of the model and drops among the rest",
}
_NAFLEX = {
    "grid": "NaFlexVit is given the coordinates of each patch",
    "num_prefix_tokens": "NaFlexVit has others before its patches",
    "absolute": "NaFlexVit resamples its absolute encoding for each image",
}


class SetInputSize:
    """Replaces a model's own `set_input_size`, which would make a learned encoding again."""

    def __init__(self, vit: Any, absolute: str) -> None:
        self.vit, self.absolute = vit, absolute

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Changes the size of the input."""
        type(self.vit).set_input_size(self.vit, *args, **kwargs)
        grid = self.vit.patch_embed.grid_size
        apply_change(put_absolute(self.vit, "pos_embed", grid, self.absolute))


def add_tokens(found: Plan, name: str, vit: Any, call: Equipment) -> None:
    """Adds the attentions of a model whose blocks work on the tokens of a patch embedding."""
    source = _source(vit, call)
    shared = next((each for each in _SHARED_BIASES if getattr(vit, each, None) is not None), None)
    drops = drops_tokens(vit)
    count = vit.patch_drop.num_prefix_tokens if drops else 0
    check = partial(refuse, call, _DROPPING, num_prefix_tokens=count)
    _add_blocks(
        found,
        name,
        vit,
        source,
        call,
        block_dim=vit.embed_dim,
        has_builtin_bias=shared is not None,
        check=check if drops else None,
        drops_tokens=drops,
    )
    if drops and source.told is None:
        found.changes += keep_indices(vit, source)
    if shared is not None and call.builtin_bias == "drop":
        if call.layers is not None:
            raise UserError(
                "builtin_bias 'drop': all layers share one relative bias, so it cannot be dropped "
                f"in layers {list(call.layers)} alone; leave layers out, or use 'keep'"
            )
        found.changes += put_module(vit, shared, None)
    if call.absolute == "keep":
        return
    if call.requires_absolute or getattr(vit, "pos_embed", None) is not None:
        if isinstance(vit, _RESAMPLING):
            refuse(call, {"absolute": "the model resamples its absolute encoding for each image"})
        change_absolute(found, vit, "pos_embed", vit.patch_embed.grid_size, call.absolute)
        found.changes += set_attribute(vit, "set_input_size", SetInputSize(vit, call.absolute))


def add_naflex(found: Plan, name: str, vit: Any, call: Equipment) -> None:
    """Adds the attentions of NaFlexVit: images of several shapes, patches with coordinates."""
    count = vit.num_prefix_tokens
    source = source_of(vit) or MeasuredGrid("embeds", _measure_shapes, count)
    check = partial(refuse, call, _NAFLEX, num_prefix_tokens=count)
    _add_blocks(found, name, vit, source, call, check=check)
    if drops_tokens(vit):
        found.changes += keep_indices(vit, source)
    elif not isinstance(vit.norm_pre, nn.Identity):
        found.changes += add_hook(vit.norm_pre, CarryMark())


def _add_blocks(
    found: Plan, name: str, vit: Any, source: MeasuredGrid, call: Equipment, **facts: Any
) -> None:
    for path, block, attention in _attentions_of(vit, name):
        row = row_of(type(attention))
        facts["block"] = block if "block_dim" in facts else None
        site = site_of(
            path,
            attention,
            row,
            call,
            *size_of(attention),
            source.num_prefix_tokens,
            changes=set_attribute(attention, SOURCE, source),
            rotates=getattr(vit, "rope", None) is not None,
            **facts,
        )
        found.sites.append(site)
    found.changes += source.follow(vit, vit.blocks)


def _attentions_of(vit: Any, name: str) -> Iterator[tuple[str, nn.Module, Any]]:
    """Yields the path, the block and the attention of all that can be equipped."""
    for index, block in enumerate(vit.blocks):
        for path, attention in block.named_modules(prefix=f"{name}.blocks.{index}".lstrip(".")):
            if isinstance(attention, _ON_TOKENS):
                yield path, block, attention


ON_TOKENS = {**dict.fromkeys(TOKEN_MODELS, add_tokens), NaFlexVit: add_naflex}
# Models whose attentions are found by their rows: the grid of the absolute encoding.
WITH_ABSOLUTE: dict[type, Callable[[Any], Sequence[int]]] = {
    VisionTransformerSAM: attrgetter("patch_embed.grid_size"),
    volo.VOLO: lambda volo: volo.pos_embed.shape[1:3],
    mvitv2.MultiScaleVit: attrgetter("patch_dims"),
}


def _source(vit: Any, call: Equipment) -> MeasuredGrid:
    size = vit.patch_embed.grid_size
    if getattr(vit.patch_embed, "strict_img_size", False):
        check_grid(call, size)
    count = call.num_prefix_tokens
    count = getattr(vit, "num_prefix_tokens", 0) if count is None else count
    made = MeasuredGrid("patch_embed", measure_patches, count, size)
    if call.grid is not None and not drops_tokens(vit):
        return replace(made, told=call.grid)
    return source_of(vit) or made


def measure_patches(call: Embedded) -> tuple[int, ...]:
    """Returns the grid that a patch embedding makes of an image."""
    embedding, (image, *_), output = call.module, call.inputs, call.output
    if output.ndim == 4:  # batch rows columns channels, of models with dynamic_img_size
        return tuple(output.shape[1:3])
    if hasattr(embedding, "dynamic_feat_size"):
        return tuple(embedding.dynamic_feat_size(image.shape[-2:]))
    return tuple(embedding.grid_size)


def _measure_shapes(call: Embedded) -> Measured:
    """Returns the grid of images, or the coordinates of patches; the host masks the padding."""
    coordinates = call.keywords.get("patch_coord")
    if coordinates is None:
        return tuple(call.output[1])
    return Positions(Points(coordinates), None, call.module.num_prefix_tokens)
