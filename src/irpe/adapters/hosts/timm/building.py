"""timm: how a model is built again from what it knows about itself."""

from typing import Any

import timm
import torch
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

_SIZES = {"depth", "embed_dim", "in_chans", "img_size", "num_heads", "patch_size"}


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
    rest = {name: value for name, value in arguments.items() if name != "model_name"}
    return create_timm_model(arguments["model_name"], rest)


def create_timm_model(name: str, arguments: dict[str, Any], pretrained: bool = False) -> nn.Module:
    """Returns a model of timm, or raises an error that says which argument cannot be.

    Args:
        name: timm's name of the model.
        arguments: More arguments of `timm.create_model`.
        pretrained: Fill it with timm's weights.
    """
    for size in _SIZES & set(arguments):
        values = arguments[size]
        for value in values if isinstance(values, list | tuple) else [values]:
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{size} = {values!r} must be a whole number of at least 1")
    try:
        model = timm.create_model(name, pretrained, **arguments)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError) as error:
        if "divisible by num_heads" in str(error):
            raise _uneven_heads(name, arguments) from error
        raise ValueError(f"model {name!r} with {arguments}: {error}") from error
    embedding: Any = getattr(model, "patch_embed", None)
    if 0 in (getattr(embedding, "grid_size", None) or ()):
        raise ValueError(
            f"image_size = {embedding.img_size[0]} is less than a patch of {name}, "
            f"{embedding.patch_size[0]} pixels: choose a larger image or a smaller patch_size"
        )
    return model


def _uneven_heads(name: str, arguments: dict[str, Any]) -> ValueError:
    """Returns the error for a dimension that cannot be split between the heads."""
    with torch.device("meta"):  # what is not given is the model's own
        own: Any = timm.create_model(name)
    sizes = {"embed_dim": own.embed_dim, "num_heads": own.blocks[0].attn.num_heads, **arguments}
    dim, heads = sizes["embed_dim"], sizes["num_heads"]
    divisors = ", ".join(str(k) for k in range(1, min(dim, 64) + 1) if dim % k == 0)
    return ValueError(
        f"embed_dim = {dim} of {name} cannot be split between num_heads = {heads}: choose "
        f"num_heads from {divisors}, or an embed_dim that is a multiple of {heads}"
    )
