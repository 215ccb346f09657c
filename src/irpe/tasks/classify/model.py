"""The classifier of a configuration: built by timm, equipped, and filled with initial weights."""

from pathlib import Path
from typing import Any

from torch import nn

from irpe.adapters.equip import equip
from irpe.adapters.hosts.timm.building import create_timm_model, takes_argument
from irpe.errors import UserError
from irpe.tasks.classify.config import ClassifierConfig
from irpe.train.weights import read_weights, start_from


def build_model(
    config: ClassifierConfig, num_classes: int, size: tuple[int, int] | None = None
) -> nn.Module:
    """Returns the model to train; its random start follows from torch's random state.

    Args:
        config: The configuration.
        num_classes: The number of classes of the data.
        size: The rows and columns of its images, if they are not those of the configuration.
    """
    arguments: dict[str, Any] = {
        "img_size": config.image_size if size is None else size,
        "in_chans": config.channels,
        "num_classes": num_classes,
        "drop_path_rate": config.drop_path,
        **config.model_args,
    }
    try:
        model = create_timm_model(config.model, arguments, config.initial == "pretrained")
    except ValueError as error:
        if takes_argument(config.model, img_size=config.image_size):
            raise
        raise UserError(
            f"model {config.model!r} is not a vision transformer that is made for an image size: "
            "irpe models lists those that can be equipped"
        ) from error
    if (config.encoding, config.absolute, config.builtin_bias) != ("none", "keep", "keep"):
        equip(model, config.encoding, absolute=config.absolute, builtin_bias=config.builtin_bias)
    if config.initial is not None and config.initial != "pretrained":
        start_from(model, read_weights(Path(config.initial)), config.initial)
    return model
