"""The mean and deviation of the images that a model of timm was made for."""

from typing import Any

import timm


def normalization(name: str, kind: str = "model") -> dict[str, list[float]]:
    """Returns the mean and the standard deviation of each colour, whose values are 0 to 1.

    Args:
        name: timm's name of the model.
        kind: What to call it in errors.
    """
    try:
        config: Any = timm.get_pretrained_cfg(name)
    except RuntimeError:  # no such tag
        config = None
    if config is None:
        raise ValueError(f"{kind} {name!r} is not one of timm's")
    return {"mean": list(config.mean), "std": list(config.std)}
