"""timm: how a model is built again from what it knows about itself."""

from contextlib import nullcontext
from typing import Any

import timm
import torch
from timm.models import get_model_args
from torch import nn

from irpe.errors import MissingFileError, UserError
from irpe.hub import cached_if_unreachable

# Which texts a description may hold: timm looks each of them up in a table.
_TEXTS = {"model_name", "act_layer", "global_pool", "norm_layer", "rel_pos_type"}

_SIZES = {"depth", "embed_dim", "in_chans", "img_size", "num_heads", "patch_size"}


def describe_model(model: nn.Module) -> dict[str, Any] | None:
    """Returns the arguments of `timm.create_model` that timm recorded, if json can hold them."""
    config: Any = getattr(model, "pretrained_cfg", None) or {}
    if not type(model).__module__.startswith("timm.") or not config.get("architecture"):
        return None
    recorded = {**vars(model).get("_model_args", {}), **get_model_args(model)}
    arguments = {"model_name": config["architecture"], **recorded}
    if not all(_is_plain(*item) for item in arguments.items()):
        return None
    return dict(sorted(arguments.items()))  # one model, one description


def _is_plain(name: str, value: object) -> bool:
    """Returns whether an argument is a number, a switch or a list of these: no path, no code."""
    if isinstance(value, list | tuple):
        return all(_is_plain("", item) for item in value)
    return isinstance(value, bool | int | float) or (isinstance(value, str) and name in _TEXTS)


def build_model(arguments: dict[str, Any]) -> nn.Module:
    """Returns the plain model of a description: no path and no code gets through to timm."""
    refused = sorted(name for name, value in arguments.items() if not _is_plain(name, value))
    if refused:
        raise UserError(f"arguments {refused} are not numbers, switches or lists of these")
    if not timm.is_model(arguments["model_name"]):
        raise UserError(f"model_name {arguments['model_name']!r} is not a model of timm")
    rest = {name: value for name, value in arguments.items() if name != "model_name"}
    return create_timm_model(arguments["model_name"], rest)


def create_timm_model(name: str, arguments: dict[str, Any], pretrained: bool = False) -> nn.Module:
    """Returns a model of timm, or raises an error that says which argument cannot be."""
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
    """Returns whether a model of timm has an argument: a convolutional one has no `img_size`."""
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
