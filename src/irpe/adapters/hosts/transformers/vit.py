"""transformers' vision transformers: patches from a convolution, then blocks with self-attention.

A family is an entry of `_TOWERS`. Its attentions keep their own forward (see `attention`), that of
DINOv3 excepted, which rotates queries and keys.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers.models.dinov3_vit.modeling_dinov3_vit import apply_rotary_pos_emb

from irpe.adapters.changes import Change, Undo, drop_module, put_absolute
from irpe.adapters.following import (
    Embedded,
    FollowedGrid,
    follow_grid,
    followed_grid,
    map_source,
)
from irpe.adapters.grids import GridSource, InputGrid
from irpe.adapters.hosts.transformers.attention import Forward, attend, make_site
from irpe.adapters.hosts.transformers.classes import entry_of, modules_of
from irpe.adapters.plan import Plan, Request
from irpe.core.places import Points
from irpe.core.positions import Positions
from irpe.errors import UserError


class _Rotation:
    """DINOv3's rotation of patches; the tokens before them stay.

    Args:
        cos: patches, dim
        sin: patches, dim
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def __call__(self, tokens: Tensor) -> Tensor:
        """Returns rotated queries or keys."""
        return apply_rotary_pos_emb(tokens, tokens, self.cos, self.sin)[0]


def _forward_rotated(
    self: Any,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """The forward of an equipped DINOv3ViTAttention: tables meet q and k before the rotation."""
    parts = (project(hidden_states) for project in (self.q_proj, self.k_proj, self.v_proj))
    q, k, v = (x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in parts)
    dropout = self.dropout if self.training else 0.0
    rotate = None if position_embeddings is None else _Rotation(*position_embeddings)
    z, weights = attend(self, q, k, v, attention_mask, dropout, self.scaling, rotate, **kwargs)
    return self.o_proj(z.flatten(2)), weights


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
        forward: The forward of an equipped attention that rotates queries and keys.
    """

    block: str
    attention: str = "attention"
    convolution: str | None = "patch_embeddings.projection"
    position: str | None = "position_embeddings"
    suffix: str | None = None
    forward: Forward | None = None


def _clip(block: str, convolution: str | None = "patch_embedding") -> _Tower:
    """Returns a tower that is built as that of CLIP."""
    return _Tower(block, "self_attn", convolution, "position_embedding")


# By the name of the class of the embeddings.
_TOWERS = {
    "ViTEmbeddings": _Tower("ViTLayer"),
    "DeiTEmbeddings": _Tower("DeiTLayer"),
    "Dinov2Embeddings": _Tower("Dinov2Layer"),
    "Dinov2WithRegistersEmbeddings": _Tower("Dinov2WithRegistersLayer"),
    "DINOv3ViTEmbeddings": _Tower(
        "DINOv3ViTLayer",
        convolution="patch_embeddings",
        position=None,
        forward=_forward_rotated,
    ),
    "BeitEmbeddings": _Tower("BeitLayer"),
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


def add_sites(found: Plan, name: str, vit: Any, request: Request) -> None:
    """Adds the attentions of a vision transformer, and what else changes in it."""
    embeddings = getattr(vit, "embeddings", None)
    tower = entry_of(embeddings, _TOWERS)
    if tower is None:
        return
    source = _grid_source(vit, embeddings, tower, request)
    count = request.num_prefix_tokens
    count = _count_tokens(embeddings, _PREFIX) if count is None else count
    suffix = 0 if tower.suffix is None else _count_tokens(embeddings, (tower.suffix,))
    check = partial(_check, vit, embeddings, tower, request)
    blocks = modules_of(vit, tower.block, name)
    for path, block in blocks.items():
        has_bias = _has_module(block, _BIAS)
        drops = has_bias and request.builtin_bias == "drop"
        site = make_site(
            f"{path}.{tower.attention}",
            block.get_submodule(tower.attention),
            count,
            source,
            num_suffix_tokens=suffix,
            forward=tower.forward,
            check=check,
            changes=[partial(drop_module, block, _BIAS)] if drops else [],
            has_builtin_bias=has_bias or _has_module(vit, _SHARED_BIAS),
        )
        found.sites.append(replace(site, rotates=tower.forward is not None))
    found.changes += _other_changes(vit, embeddings, tower, request, source)
    found.changes.append(partial(follow_grid, source, blocks.values()))


def _other_changes(
    vit: Any, embeddings: Any, tower: _Tower, request: Request, source: GridSource
) -> list[Change]:
    changes: list[Change] = []
    if request.absolute != "keep":
        changes.append(partial(_replace_absolute, vit, embeddings, tower, request.absolute))
    if request.builtin_bias == "drop" and _has_module(vit, _SHARED_BIAS):
        changes.append(partial(drop_module, vit, _SHARED_BIAS))
    if tower.convolution is None and request.grid is not None:
        changes.append(partial(_check_shapes, embeddings, source))
    return changes


def _grid_source(vit: Any, embeddings: Any, tower: _Tower, request: Request) -> GridSource:
    if tower.convolution is None:
        made = FollowedGrid(None, vit, "embeddings", _measure_shapes)
        return GridSource(request.grid) if request.grid else followed_grid(vit) or made
    path = f"embeddings.{tower.convolution}"
    return map_source(request.grid, _own_grid(vit, embeddings), vit, path)


def _measure_shapes(call: Embedded) -> InputGrid:
    """Returns where the patches of images of several shapes are; the host masks the padding.

    Images of one shape without padding are on a grid, whose maps are made once.
    """
    patches, shapes = call.inputs
    count = patches.shape[1]
    first = tuple(shapes[0].tolist())
    if math.prod(first) == count and bool((shapes == shapes[0]).all()):
        return first
    return Positions(Points(Points.of_grids(shapes, count).coordinates))


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
    size, patch = (
        (value, value) if isinstance(value, int) else tuple(value)
        for value in (config.image_size, config.patch_size)
    )
    return size[0] // patch[0], size[1] // patch[1]


def _count_tokens(embeddings: Any, names: tuple[str, ...]) -> int:
    tokens = [getattr(embeddings, name, None) for name in names]
    return sum(token.numel() // token.shape[-1] for token in tokens if token is not None)


def _has_module(owner: nn.Module, name: str) -> bool:
    return owner._modules.get(name) is not None


def _check(vit: nn.Module, embeddings: Any, tower: _Tower, request: Request) -> None:
    name = type(vit).__name__
    if request.absolute == "keep":
        return
    if tower.suffix is not None:
        raise UserError(
            f"absolute {request.absolute!r}: the absolute encoding of {name} is that of its "
            f"{tower.suffix.replace('_', ' ')} too; use 'keep'"
        )
    has_none = tower.position is None or getattr(embeddings, tower.position) is None
    if has_none and request.requires_absolute:
        raise UserError(
            f"absolute {request.absolute!r}: {name} has no absolute encoding to replace; use 'keep'"
        )


def _replace_absolute(vit: Any, embeddings: Any, tower: _Tower, absolute: str) -> Undo:
    absolute_encoding = None if tower.position is None else getattr(embeddings, tower.position)
    if tower.position is None or absolute_encoding is None:
        return lambda: None
    grid = _own_grid(vit, embeddings)
    if isinstance(absolute_encoding, nn.Embedding):
        return put_absolute(absolute_encoding, "weight", grid, absolute)
    return put_absolute(embeddings, tower.position, grid, absolute)


def _check_shapes(embeddings: nn.Module, source: GridSource) -> Undo:
    return embeddings.register_forward_pre_hook(CheckShapes(source)).remove


class CheckShapes:
    """A hook on embeddings that get patches: raises an error if these are of another grid.

    Args:
        source: Where the attentions look the grid up.
    """

    def __init__(self, source: GridSource) -> None:
        self.source = source

    def __call__(self, embeddings: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Compares the shape of each image with the grid."""
        grid = self.source.current()
        assert not isinstance(grid, Positions)
        patches, shapes = inputs
        others = [tuple(shape) for shape in shapes.tolist() if tuple(shape) != grid]
        if others or patches.shape[1] != grid[0] * grid[1]:
            shape = others[0] if others else f"{patches.shape[1]} patches, with padding"
            raise UserError(
                f"an image of {shape}: the model was equipped with grid={grid} for all images; "
                "resize them to it, with max_num_patches as many as the grid has"
            )
