"""The mean and deviation of the images that a model of timm was made for."""

from typing import Any

import timm

from irpe.errors import UserError, did_you_mean


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
        names = timm.list_pretrained() if "." in name else timm.list_models()
        hint = _name_that_begins_with(name, names) or did_you_mean(name, names)
        raise UserError(f"{kind} {name!r} is not one of timm's {len(names)} models{hint}")
    return {"mean": list(config.mean), "std": list(config.std)}


def _name_that_begins_with(text: str, names: list[str]) -> str:
    """Returns the end of an error with the shortest name that goes on from a text, if any does."""
    longer = [name for name in names if text and name.startswith(text)]
    return f"; did you mean {min(longer, key=len)!r}?" if longer else ""
