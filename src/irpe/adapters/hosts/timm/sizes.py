"""timm: which size of images a model is for, and how it gets another one."""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from irpe.adapters.hosts.timm.building import build_model, describe_model
from irpe.errors import UserError

Size = tuple[int, int]


def image_size_of(module: Any) -> Size | None:
    """Returns the rows and columns that a model of timm is for; `None` for any other module."""
    config: Any = getattr(module, "pretrained_cfg", None)
    if not type(module).__module__.startswith("timm.models.") or not config:
        return None
    embedding = getattr(module, "patch_embed", None)
    for size in (getattr(module, "img_size", None), getattr(embedding, "img_size", None)):
        if size is not None:
            return (size, size) if isinstance(size, int) else (size[0], size[1])
    rows, columns = config["input_size"][-2:]
    return rows, columns


def channels_of(model: nn.Module) -> int:
    """Returns the channels of the images that a model takes."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    return 3 if first is None else first.in_channels


def patch_of(model: Any) -> int:
    """Returns the side of a patch, or of what a model reduces to one element."""
    size: Any = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if size is None:
        return 32
    return size if isinstance(size, int) else max(size)


def run(model: nn.Module, images: Tensor) -> object:
    """Runs a model."""
    return model(images)


def set_input_size(model: Any, size: Size) -> bool:
    """Sets a model to a size if timm knows how to, and returns whether it does.

    Windows stay as large as they are, where they fit; timm would scale them with the image.
    """
    if not hasattr(model, "set_input_size"):
        return False
    patch: Any = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    pads = getattr(getattr(model, "patch_embed", None), "dynamic_img_pad", False)
    if isinstance(patch, Sequence) and not pads:
        for length, side in zip(size, patch, strict=False):
            if length % side:
                raise UserError(f"patches of {side} x {side} pixels do not divide {length}")
    windows = getattr(model, "_ref_window_sizes", None)
    if windows is None:
        with warnings.catch_warnings(action="ignore"):  # of how timm resamples
            model.set_input_size(img_size=size)
        return True
    arguments = dict(getattr(model, "_model_args", {}))
    with warnings.catch_warnings(action="ignore"):
        model.set_input_size(img_size=size, window_size=windows)
    if "window_size" not in arguments and len(set(windows)) == 1:
        arguments["window_size"] = windows[0]
    if "window_size" in arguments:  # as it was given, not stage by stage
        model._model_args["window_size"] = arguments["window_size"]
    return True


def build_for_size(model: nn.Module, size: Size) -> nn.Module:
    """Returns a model like one of timm's for images of a size, without values."""
    arguments = describe_model(model)
    if arguments is None:
        raise UserError("how it was made is not known")
    with torch.device("meta"):
        return build_model({**arguments, "img_size": size})


def adopt_configuration(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Records the size with which timm would make the model."""
    for name in ("_model_args", "_traits"):
        if hasattr(new, name):
            vars(model)[name] = vars(new)[name]
