"""timm: how a model is built again from what it knows about itself."""

from typing import Any

import timm
from timm.layers.attention import Attention
from timm.layers.drop import DropPath
from timm.layers.mlp import Mlp
from timm.models.swin_transformer import SwinTransformer, WindowAttention
from timm.models.vision_transformer import VisionTransformer
from torch import nn

_ARGUMENTS = {
    "model_name", "num_classes", "in_chans", "img_size", "global_pool", "drop_path_rate", "depth",
    "embed_dim", "num_heads", "patch_size", "dynamic_img_size",
    "mlp_ratio",
}  # fmt: skip


def describe_model(model: nn.Module) -> dict[str, Any] | None:
    """Returns arguments of `timm.create_model` for a model, if it is one of timm's."""
    if not isinstance(model, VisionTransformer | SwinTransformer):
        return None
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    attentions = [m for m in model.modules() if isinstance(m, Attention | WindowAttention)]
    if not config.get("architecture") or not attentions:
        return None
    embedding: Any = model.patch_embed
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    arguments = {
        "model_name": config["architecture"],
        "num_classes": model.num_classes,
        "in_chans": model.in_chans,
        "img_size": embedding.img_size,
        "drop_path_rate": max(rates, default=0.0),
    }
    if isinstance(model, VisionTransformer):
        arguments |= {
            "global_pool": model.global_pool,
            "depth": len(model.blocks),
            "embed_dim": model.embed_dim,
            "num_heads": attentions[0].num_heads,
            "patch_size": embedding.patch_size[0],
            "dynamic_img_size": model.dynamic_img_size,
        }
        blocks: Any = model.blocks
        mlp: Any = getattr(blocks[0], "mlp", None)
        if type(mlp) is Mlp:
            first: Any = mlp.fc1
            arguments["mlp_ratio"] = first.out_features / first.in_features
    return arguments


def build_model(arguments: dict[str, Any]) -> nn.Module:
    """Returns the plain model of a description: no other argument of timm's gets through."""
    unknown = sorted(set(arguments) - _ARGUMENTS)
    if unknown:
        raise ValueError(f"arguments {unknown} are not among {', '.join(sorted(_ARGUMENTS))}")
    if not timm.is_model(arguments["model_name"]):
        raise ValueError(f"model_name {arguments['model_name']!r} is not a model of timm")
    try:
        return timm.create_model(**arguments)
    except (AssertionError, ArithmeticError) as error:  # how timm says that arguments do not fit
        raise ValueError(f"timm has no such model: {error}") from error
