"""Models by name: those of timm, and those of transformers by their type or their name on the hub.

A type ("vit", "dinov2", "swin") is built with the defaults of its configuration, a name with a
slash with its own.
"""

from typing import Any

import torch
from torch import nn

from irpe.adapters.equip import equip
from irpe.errors import UserError, did_you_mean
from irpe.extras import require


def create(model: str, encoding: str, resolution: int | None, device: str) -> nn.Module:
    """Returns an untrained model with an encoding or "none", in eval mode.

    Args:
        model: Its name.
        encoding: The text of the encoding.
        resolution: The height and width of its images; `None` takes the model's own.
        device: Where it is made; "meta" is enough for counting.
    """
    own = input_size(model)[-1]
    if resolution is not None and resolution < 1:
        raise UserError(f"resolution = {resolution} must be 1 or more: pixels, such as {own}")
    with torch.device(device):
        made = _create(model, None if resolution == own else resolution)
    return made.eval() if encoding == "none" else equip(made, encoding).eval()


def input_size(model: str) -> tuple[int, int, int]:
    """Returns the channels, height and width of a model's images."""
    timm: Any = require("timm", "timm")
    if timm.is_model(model):
        return tuple(timm.get_pretrained_cfg(model).input_size)
    config = _config_of(model)
    config = getattr(config, "vision_config", config)
    side = getattr(config, "image_size", None)
    height, width = side if isinstance(side, list | tuple) else (side or 224,) * 2
    return getattr(config, "num_channels", 3), height, width


def is_known(model: str) -> bool:
    """Returns whether a name is that of a model of timm, or of a type of transformers."""
    timm: Any = require("timm", "timm")
    return timm.is_model(model) or model in _types()


def _create(model: str, resolution: int | None) -> nn.Module:
    timm: Any = require("timm", "timm")
    if timm.is_model(model):
        is_fixed = resolution is not None and timm.get_pretrained_cfg(model).fixed_input_size
        return timm.create_model(model, **({"img_size": resolution} if is_fixed else {}))
    transformers: Any = require("transformers", "transformers")
    config = _config_of(model)
    if resolution is not None and hasattr(config, "image_size"):
        config.image_size = resolution
    try:
        return transformers.AutoModel.from_config(config)
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"model {model!r} of transformers cannot be built: {error}") from error


def _config_of(model: str) -> Any:
    """Returns the configuration of a model of transformers, or raises an error."""
    types = _types()
    if model in types:
        return types[model]()
    if "/" in model:
        from irpe.hub import cached_if_unreachable

        transformers: Any = require("transformers", "transformers")
        try:
            with cached_if_unreachable():
                return transformers.AutoConfig.from_pretrained(model)
        except (OSError, ValueError) as error:
            text = str(error).partition("\n")[0]
            raise UserError(f"model {model!r} of transformers cannot be read: {text}") from error
    timm: Any = require("timm", "timm")
    names = timm.list_models()
    hint = did_you_mean(model, [*names, *types])
    also = f", and no type of transformers' {len(types)}" if types else ""
    raise UserError(f"model {model!r} is not one of timm's {len(names)} models{also}{hint}")


def _types() -> dict[str, Any]:
    """Returns the configurations of transformers' models by type; none if it is not installed."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError:
        return {}
    return CONFIG_MAPPING
