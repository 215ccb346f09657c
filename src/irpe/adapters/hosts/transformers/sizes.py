"""transformers: which size of images a model is for, and how it gets another one."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

Size = tuple[int, int]
_ANY = (224, 224)  # an image of models that are for no size


def image_size_of(module: nn.Module) -> Size | None:
    """Returns the rows and columns that a model is for; `None` if it does not take images."""
    if not isinstance(module, PreTrainedModel) or not _takes_images(module):
        return None
    return next(_sizes_in(module.config), _ANY)


def _takes_images(model: nn.Module) -> bool:
    return "pixel_values" in inspect.signature(model.forward).parameters


def _configs_in(config: Any) -> Iterator[Any]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _configs_in(value)


def _sizes_in(config: Any) -> Iterator[Size]:
    for each in _configs_in(config):
        size = vars(each).get("image_size")
        if isinstance(size, int):
            yield size, size
        elif isinstance(size, list | tuple) and len(size) == 2:
            yield size[0], size[1]


def channels_of(model: Any) -> int:
    """Returns the channels of the images that a model takes."""
    found = (vars(each).get("num_channels") for each in _configs_in(model.config))
    return next((count for count in found if isinstance(count, int)), 3)


def patch_of(model: Any) -> int:
    """Returns the side of a patch, or of what a model reduces to one element."""
    for each in _configs_in(model.config):
        size = vars(each).get("patch_size")
        if isinstance(size, int | list | tuple):
            return size if isinstance(size, int) else max(size)
    return 32


def run(model: nn.Module, images: Tensor) -> None:
    """Runs those parts of a model that take nothing but images."""
    parts = [m for m in model.modules() if isinstance(m, PreTrainedModel) and _takes_images(m)]
    for part in parts:
        inner = [m for m in part.modules() if m is not part]
        if not any(other in inner for other in parts):
            part(pixel_values=images)


def set_input_size(model: Any, size: Size) -> bool:
    """Returns that transformers does not know how to set a model to a size.

    Windows of Swin that an image smaller than they are has shrunk are as large as before again.
    """
    windows = (vars(each).get("window_size") for each in _configs_in(model.config))
    window = next((each for each in windows if isinstance(each, int)), 0)
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    for index, block in (pair for blocks in lists for pair in enumerate(blocks)):
        if hasattr(block, "set_shift_and_window_size"):
            vars(block)["window_size"] = window
            vars(block)["shift_size"] = window // 2 if index % 2 else 0
    return False


def build_for_size(model: Any, size: Size) -> nn.Module:
    """Returns a model like one of transformers for images of a size, without values."""
    config, own = copy.deepcopy(model.config), next(_sizes_in(model.config), None)
    for each in _configs_in(config):
        if next(_sizes_in(each), None) == own and "image_size" in vars(each):
            each.image_size = size[0] if size[0] == size[1] else size
            if hasattr(each, "image_embedding_size"):  # of a decoder of SAM
                each.image_embedding_size = size[0] // each.patch_size
    if hasattr(config, "irpe"):
        del config.irpe
    with torch.device("meta"):
        return type(model)(config)


def adopt_configuration(model: Any, old: Any, new: Any) -> None:
    """Sets in the configurations of a model what differs between two others."""
    found = zip(*(list(_configs_in(each.config)) for each in (model, old, new)), strict=True)
    for own, before, after in found:
        for name in ("image_size", "image_embedding_size"):
            if vars(before).get(name) != vars(after).get(name):
                vars(own)[name] = vars(after)[name]
