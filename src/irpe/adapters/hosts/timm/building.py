"""timm: how a model is built again from what it knows about itself."""

from contextlib import nullcontext
from typing import Any

import timm
import torch
from timm.layers.drop import DropPath
from timm.layers.mlp import Mlp
from torch import nn

from irpe.adapters.hosts.timm.families import TOKEN_MODELS
from irpe.errors import MissingFileError, UserError
from irpe.hub import cached_if_unreachable

# Which arguments of `timm.create_model` a description may hold: sizes and switches, no paths.
_ARGUMENTS = {
    "model_name", "num_classes", "in_chans", "img_size", "global_pool", "drop_path_rate", "depth",
    "embed_dim", "num_heads", "patch_size", "dynamic_img_size", "dynamic_img_pad", "mlp_ratio",
    "class_token", "init_values", "qkv_bias", "qkv_fused", "qk_norm", "num_kv_heads", "swiglu_mlp",
    "num_reg_tokens", "merge_size", "depths", "embed_dims", "window_size", "neck_chans",
    "use_rel_pos", "use_rope", "use_abs_pos", "global_attn_indexes", "use_abs_pos_emb",
    "use_rel_pos_bias", "use_shared_rel_pos_bias", "use_rot_pos_emb", "use_post_norm",
    "scale_attn_inner", "rel_pos_type", "shared_rel_pos", "layers",
    "strict_img_size", "pretrained_window_sizes", "mlp_ratios", "wss", "sr_ratios", "linear",
    "patch_drop_rate",
}  # fmt: skip

_SIZES = {"depth", "embed_dim", "in_chans", "img_size", "num_heads", "patch_size"}


def describe_model(model: nn.Module) -> dict[str, Any] | None:
    """Returns arguments of `timm.create_model` for a model, if it is one of timm's.

    They are those that timm recorded, and those that can be read from the model as it is now.
    """
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    if not type(model).__module__.startswith("timm.") or not config.get("architecture"):
        return None
    recorded: dict[str, Any] = getattr(model, "_model_args", {})  # not in older releases of timm
    arguments = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in recorded.items()
        if name in _ARGUMENTS and _is_plain(value)
    }
    arguments["model_name"] = config["architecture"]
    embedding: Any = getattr(model, "patch_embed", None)
    rates = [module.drop_prob for module in model.modules() if isinstance(module, DropPath)]
    arguments["drop_path_rate"] = max(rates, default=0.0)
    for name in ("num_classes", "in_chans"):
        if hasattr(model, name):
            arguments[name] = getattr(model, name)
    if hasattr(embedding, "img_size"):
        arguments["img_size"] = embedding.img_size
    if isinstance(model, TOKEN_MODELS):
        arguments |= _sizes_of(model)
    return dict(sorted(arguments.items()))  # one model, one description


def _sizes_of(model: Any) -> dict[str, Any]:
    """Returns what a model with blocks knows about its sizes, recorded by timm or not."""
    first = model.blocks[0]
    arguments = {
        "global_pool": model.global_pool,
        "depth": len(model.blocks),
        "embed_dim": model.embed_dim,
        "patch_size": model.patch_embed.patch_size[0],
    }
    if hasattr(model, "dynamic_img_size"):
        arguments["dynamic_img_size"] = model.dynamic_img_size
    if hasattr(getattr(model, "patch_drop", None), "prob"):
        arguments["patch_drop_rate"] = model.patch_drop.prob
    if hasattr(first, "attn"):
        arguments["num_heads"] = first.attn.num_heads
    if type(getattr(first, "mlp", None)) is Mlp:
        arguments["mlp_ratio"] = first.mlp.fc1.out_features / first.mlp.fc1.in_features
    return arguments


def _is_plain(value: object) -> bool:
    """Tells whether json can hold a value as it is."""
    if isinstance(value, list | tuple):
        return all(isinstance(item, int | float) for item in value)
    return isinstance(value, bool | int | float | str)


def build_model(arguments: dict[str, Any]) -> nn.Module:
    """Returns the plain model of a description: no other argument of timm's gets through."""
    unknown = sorted(set(arguments) - _ARGUMENTS)
    if unknown:
        raise UserError(f"arguments {unknown} are not among {', '.join(sorted(_ARGUMENTS))}")
    if not timm.is_model(arguments["model_name"]):
        raise UserError(f"model_name {arguments['model_name']!r} is not a model of timm")
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
                raise UserError(f"{size} = {values!r} must be a whole number of at least 1")
    try:
        with cached_if_unreachable() if pretrained else nullcontext():
            model = timm.create_model(name, pretrained, **arguments)
    except OSError as error:  # of the network, or of the hub's cache
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MissingFileError(
            f"the pretrained weights of {name} cannot be downloaded, and the cache of the hub does "
            f"not have them ({reason}): start from a file or a run instead"
        ) from error
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError) as error:
        if "divisible by num_heads" in str(error):
            raise _uneven_heads(name, arguments) from error
        raise UserError(f"model {name!r} with {arguments}: {error}") from error
    embedding: Any = getattr(model, "patch_embed", None)
    if 0 in (getattr(embedding, "grid_size", None) or ()):
        raise UserError(
            f"image_size = {embedding.img_size[0]} is less than a patch of {name}, "
            f"{embedding.patch_size[0]} pixels: choose a larger image or a smaller patch_size"
        )
    return model


def takes_argument(name: str, **argument: Any) -> bool:
    """Returns whether a model of timm has an argument: a convolutional one has no `img_size`.

    Args:
        name: timm's name of the model.
        argument: The argument, with a value.
    """
    try:
        with torch.device("meta"):
            create_timm_model(name, argument)
    except ValueError as error:
        return not isinstance(error.__cause__, TypeError)
    return True


def _uneven_heads(name: str, arguments: dict[str, Any]) -> UserError:
    """Returns the error for a dimension that cannot be split between the heads."""
    with torch.device("meta"):  # what is not given is the model's own
        own: Any = timm.create_model(name)
    sizes = {"embed_dim": own.embed_dim, "num_heads": own.blocks[0].attn.num_heads, **arguments}
    dim, heads = sizes["embed_dim"], sizes["num_heads"]
    divisors = ", ".join(str(k) for k in range(1, min(dim, 64) + 1) if dim % k == 0)
    return UserError(
        f"embed_dim = {dim} of {name} cannot be split between num_heads = {heads}: choose "
        f"num_heads from {divisors}, or an embed_dim that is a multiple of {heads}"
    )
