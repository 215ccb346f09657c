"""transformers' vision transformers: patches from a convolution, then blocks with self-attention.

A family is an entry of `_TOWERS`. Its attentions run their own forward (see `attention`).
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from irpe.adapters.equipped import Equipment
from irpe.adapters.grids import Embedded, Measured, MeasuredGrid, measured_map, source_of
from irpe.adapters.host import Plan, Row, change_absolute, refuse
from irpe.adapters.hosts.transformers.attention_interface import (
    IN_WINDOWS,
    REGISTERED,
    Suffix,
    Windows,
    make_site,
)
from irpe.adapters.hosts.transformers.classes import entry_of, modules_of
from irpe.adapters.swaps import add_hook, put_module, set_attribute
from irpe.core.positions import Positions
from irpe.core.token_sets import Points
from irpe.errors import UserError


@dataclass(frozen=True)
class _Tower:
    """Where a family of vision transformers has what an encoding needs.

    Args:
        block: The name of the class of its blocks.
        attention: The path in a block to its attention.
        convolution: The path in the embeddings to the convolution that makes the patches; `None`
            where patches are made elsewhere, of images of several shapes.
        position: The name in the embeddings of the absolute encoding, which ends with the patches;
            `None` if there is none.
        suffix: The name in the embeddings of learned tokens after the patches.
        windows: The name in the configuration of the number of windows along each axis, in which
            blocks work; some blocks join them.
    """

    block: str
    attention: str = "attention"
    convolution: str | None = "patch_embeddings.projection"
    position: str | None = "position_embeddings"
    suffix: str | None = None
    windows: str | None = None

    def num_windows(self, vit: Any) -> int:
        """Returns the number of windows along each axis; 1 for a model without."""
        return 1 if self.windows is None else getattr(vit.config, self.windows)


def _clip(block: str, convolution: str | None = "patch_embedding") -> _Tower:
    """Returns a tower that is built as that of CLIP."""
    return _Tower(block, "self_attn", convolution, "position_embedding")


# By the name of the class of the embeddings.
_TOWERS = {
    "ViTEmbeddings": _Tower("ViTLayer"),
    "DeiTEmbeddings": _Tower("DeiTLayer"),
    "Dinov2Embeddings": _Tower("Dinov2Layer"),
    "Dinov2WithRegistersEmbeddings": _Tower("Dinov2WithRegistersLayer"),
    "DINOv3ViTEmbeddings": _Tower("DINOv3ViTLayer", convolution="patch_embeddings", position=None),
    "BeitEmbeddings": _Tower("BeitLayer"),
    "Data2VecVisionEmbeddings": _Tower("Data2VecVisionLayer", "attention.attention"),
    "VitPoseBackboneEmbeddings": _Tower("VitPoseBackboneLayer", "attention.attention"),
    "Sapiens2Embeddings": _Tower("Sapiens2Layer", convolution="patch_embeddings", position=None),
    "RfDetrDinov2Embeddings": _Tower("RfDetrDinov2Layer", windows="num_windows"),
    "LwDetrViTEmbeddings": _Tower(
        "LwDetrViTLayer", convolution="projection", windows="num_windows_side"
    ),
    "ViTMSNEmbeddings": _Tower("ViTMSNLayer"),
    "YolosEmbeddings": _Tower("YolosLayer", "attention.attention", suffix="detection_tokens"),
    "ASTEmbeddings": _Tower("ASTLayer"),
    "IJepaEmbeddings": _Tower("IJepaLayer"),
    "PixioEmbeddings": _Tower("PixioLayer"),
    "DPTViTEmbeddings": _Tower("DPTViTLayer", "attention.attention"),
    "InternVLVisionEmbeddings": _Tower("InternVLVisionLayer"),
    "CLIPVisionEmbeddings": _clip("CLIPEncoderLayer"),
    "SiglipVisionEmbeddings": _clip("SiglipEncoderLayer"),
    "Siglip2VisionEmbeddings": _clip("Siglip2EncoderLayer", convolution=None),
    "AltCLIPVisionEmbeddings": _clip("AltCLIPEncoderLayer"),
    "ChineseCLIPVisionEmbeddings": _clip("ChineseCLIPVisionLayer"),
    "CLIPSegVisionEmbeddings": _clip("CLIPSegEncoderLayer"),
    "MetaClip2VisionEmbeddings": _clip("MetaClip2EncoderLayer"),
    "VivitEmbeddings": _Tower("VivitLayer"),
    "GitVisionEmbeddings": _clip("GitVisionEncoderLayer"),
    "Kosmos2VisionEmbeddings": _clip("Kosmos2VisionEncoderLayer"),
    "OwlViTVisionEmbeddings": _clip("OwlViTEncoderLayer"),
    "Owlv2VisionEmbeddings": _clip("Owlv2EncoderLayer"),
    "Blip2VisionEmbeddings": _clip("Blip2EncoderLayer"),
    "InstructBlipVisionEmbeddings": _clip("InstructBlipEncoderLayer"),
    "JanusVisionEmbeddings": _clip("JanusVisionEncoderLayer"),
    "IdeficsVisionEmbeddings": _clip("IdeficsVisionEncoderLayer"),
}
_PREFIX = ("cls_token", "class_embedding", "distillation_token", "register_tokens")
_BIAS, _SHARED_BIAS = "relative_position_bias", "shared_position_bias"  # of BEiT


# Tables meet queries and keys before the rotation.
_ROTATING = replace(REGISTERED, rotates="apply_rotary_pos_emb", rotates_pairs=True)
ROWS = {
    "DINOv3ViTAttention": _ROTATING,
    "Sapiens2Attention": _ROTATING,
    "RfDetrDinov2Attention": IN_WINDOWS,
    "LwDetrViTAttention": IN_WINDOWS,
    "Data2VecVisionSelfAttention": Row(),  # with attn_implementation "eager": an error says so
    "Data2VecVisionSdpaSelfAttention": Row(
        bias=("relative_position_bias",), off={"has_relative_position_bias": bool}
    ),
}


def add_sites(found: Plan, name: str, vit: Any, call: Equipment) -> None:
    """Adds the attentions of a vision transformer, and what else changes in it."""
    embeddings: Any = getattr(vit, "embeddings", None)
    tower = entry_of(embeddings, _TOWERS)
    if tower is None:
        return
    count = call.num_prefix_tokens
    count = _count_tokens(embeddings, _PREFIX) if count is None else count
    suffix = 0 if tower.suffix is None else _count_tokens(embeddings, (tower.suffix,))
    source = _source(vit, embeddings, tower, count + suffix, call)
    side = tower.num_windows(vit)
    blocks, drops = modules_of(vit, tower.block, name), call.builtin_bias == "drop"
    shared = _owner_of_shared_bias(vit)
    for path, block in blocks.items():
        attention = block.get_submodule(tower.attention)
        owner = None if attention._modules.get(_BIAS) is not None else _owner_of_bias(block)
        row = entry_of(attention, ROWS) or REGISTERED
        joined = side if side > 1 and _joins_windows(block) else 1
        order = Windows(side, count) if joined > 1 else Suffix(suffix) if suffix else None
        site = make_site(
            f"{path}.{tower.attention}",
            attention,
            (count + suffix) * joined**2,
            call,
            row,
            source=source,
            order=order,
            check=partial(_check, vit, embeddings, tower, call),
            changes=put_module(owner, _BIAS, None) if drops and owner is not None else [],
            has_builtin_bias=owner is not None or shared is not None,
            rotates=row.rotates is not None,
        )
        found.sites.append(site)
    if drops and shared is not None:
        found.changes += put_module(*shared, None)
        if hasattr(shared[0], "has_relative_position_bias"):
            found.changes += set_attribute(shared[0], "has_relative_position_bias", False)
    _replace_absolute(found, vit, embeddings, tower, call)
    if tower.convolution is None and source.told is not None:
        found.changes += add_hook(embeddings, CheckShapes(source.told), before=True)
    else:
        found.changes += source.follow(vit, blocks.values())


def _joins_windows(block: Any) -> bool:
    """Returns whether the attention of a block gets all windows of an image as one sequence."""
    return block.global_attention if hasattr(block, "global_attention") else not block.window


def _owner_of_bias(block: nn.Module) -> nn.Module | None:
    """Returns the module in a block that has a relative bias of its own."""
    owners = (m for m in block.modules() if m._modules.get(_BIAS) is not None)
    return next(owners, None)


def _owner_of_shared_bias(vit: nn.Module) -> tuple[nn.Module, str] | None:
    """Returns the module with a relative bias for all blocks, and its name there."""
    candidates = [(vit, _SHARED_BIAS), (vit._modules.get("encoder"), _BIAS)]
    return next(
        ((m, name) for m, name in candidates if m is not None and m._modules.get(name) is not None),
        None,
    )


def _source(
    vit: Any, embeddings: Any, tower: _Tower, num_tokens: int, call: Equipment
) -> MeasuredGrid:
    if tower.convolution is None:
        made = MeasuredGrid("embeddings", _measure_shapes, num_tokens, told=call.grid)
        return made if call.grid else source_of(vit) or made
    path, own = f"embeddings.{tower.convolution}", _own_grid(vit, embeddings)
    side = tower.num_windows(vit)
    if side > 1:
        measure = partial(_measure_window, side=side, is_square=hasattr(embeddings, "cls_token"))
        initial = tuple(length // side for length in own)
        return source_of(vit) or MeasuredGrid(path, measure, num_tokens, initial)
    return measured_map(vit, path, num_tokens, own, call.grid)


def _measure_shapes(call: Embedded) -> Measured:
    """Returns where the patches of images of several shapes are; the host masks the padding.

    Images of one shape without padding are on a grid, whose maps are made once.
    """
    patches, shapes = call.inputs
    count = patches.shape[1]
    first = tuple(shapes[0].tolist())
    if math.prod(first) == count and bool((shapes == shapes[0]).all()):
        return first
    return Positions(Points(Points.of_grids(shapes, count).coordinates))


def _measure_window(call: Embedded, side: int, is_square: bool) -> Measured:
    """Returns the grid of one window of an image, which has `side` of them along each axis."""
    grid = tuple(call.output.shape[2:])
    if is_square and len(set(grid)) > 1:
        raise UserError(
            f"an image of {' x '.join(map(str, grid))} patches: RF-DETR mixes up the windows of "
            "images that are not square; make them square"
        )
    return tuple(length // side for length in grid)


def _own_grid(vit: Any, embeddings: Any) -> tuple[int, ...]:
    """Returns the grid that a model is configured for, which its absolute encoding has."""
    config = vit.config
    if hasattr(config, "tubelet_size"):  # videos
        sizes = (config.num_frames, *embeddings.image_size)
        return tuple(size // tube for size, tube in zip(sizes, config.tubelet_size, strict=True))
    if hasattr(embeddings, "get_shape"):  # spectrograms: frequency, time
        return embeddings.get_shape(config)
    if not hasattr(config, "image_size"):
        return (embeddings.position_embedding_size,) * 2
    return _patches(config.image_size, config.patch_size)


def _patches(size: Any, patch: Any) -> tuple[int, int]:
    """Returns the grid of patches in an image, both an integer or one for each axis."""
    size, patch = ((x, x) if isinstance(x, int) else tuple(x) for x in (size, patch))
    return size[0] // patch[0], size[1] // patch[1]


def _count_tokens(embeddings: Any, names: tuple[str, ...]) -> int:
    tokens = [getattr(embeddings, name, None) for name in names]
    return sum(token.numel() // token.shape[-1] for token in tokens if token is not None)


def _check(vit: Any, embeddings: Any, tower: _Tower, call: Equipment) -> None:
    name = type(vit).__name__
    if tower.num_windows(vit) > 1:
        reason = f"{name} cuts images into windows, whose tokens it knows"
        refuse(call, {"grid": reason, "num_prefix_tokens": reason})
    if tower.suffix is not None:
        whose = f"{name} is that of its {tower.suffix.replace('_', ' ')} too"
        refuse(call, {"absolute": f"the absolute encoding of {whose}"})
    has_none = tower.position is None or getattr(embeddings, tower.position) is None
    if has_none and call.requires_absolute:
        refuse(call, {"absolute": f"{name} has no absolute encoding to replace"})


def _replace_absolute(
    found: Plan, vit: Any, embeddings: Any, tower: _Tower, call: Equipment
) -> None:
    learned = None if tower.position is None else getattr(embeddings, tower.position)
    if learned is None or call.absolute == "keep":
        return
    assert tower.position is not None
    if tower.suffix is not None:
        return  # refused by the check of every attention
    owner, name = embeddings, tower.position
    if isinstance(learned, nn.Embedding):
        owner, name = learned, "weight"
    grid = _own_grid(vit, embeddings)
    if hasattr(vit.config, "pretrain_image_size"):  # resampled for each image
        grid = _patches(vit.config.pretrain_image_size, vit.config.patch_size)
    change_absolute(found, owner, name, grid, call.absolute)


@dataclass(frozen=True)
class CheckShapes:
    """A hook on embeddings that get patches: raises an error if these are of another grid."""

    grid: tuple[int, ...]

    def __call__(self, embeddings: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Compares the shape of each image with the grid."""
        grid = self.grid
        patches, shapes = inputs
        others = [tuple(shape) for shape in shapes.tolist() if tuple(shape) != grid]
        if others or patches.shape[1] != grid[0] * grid[1]:
            shape = others[0] if others else f"{patches.shape[1]} patches, with padding"
            raise UserError(
                f"an image of {shape}: the model was equipped with grid={grid} for all images; "
                "resize them to it, with max_num_patches as many as the grid has"
            )
