"""Weights to start from: read from a run, an equipped model or a file, and fitted to a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from irpe.errors import MissingFileError, UserError
from irpe.files import check_zip, read_safetensors, warn_unchecked

Weights = dict[str, Tensor]
HEADS = ("head", "head_dist", "class_labels_classifier")


def read_torch(path: Path) -> Any:
    """Returns the tensors, numbers and strings in a torch file; nothing in it is executed."""
    has_checksums = check_zip(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch meets damage in many ways
        raise UserError(
            f"{path} is damaged, or holds more than tensors, numbers and strings "
            f"({type(error).__name__})"
        ) from error
    if not has_checksums:
        warn_unchecked(path)
    return content


def read_weights(path: Path) -> Weights:
    """Returns the weights in a run, an equipped model or a file; nothing in it is executed.

    Args:
        path: The directory of a run or an equipped model, a .safetensors file, or a torch file.
    """
    for candidate in (path / "model" / "model.safetensors", path / "model.safetensors"):
        path = candidate if candidate.is_file() else path
    if not path.is_file():
        raise MissingFileError(f"{path} is not a finished run, an equipped model or a file")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    content = read_torch(path)
    weights: Any = content.get("model", content) if isinstance(content, dict) else content
    if not isinstance(weights, dict):
        raise UserError(f"{path} holds a {type(weights).__name__}, not weights by name")
    return weights


def start_from(model: nn.Module, weights: Weights, name: str, heads: Sequence[str] = HEADS) -> None:
    """Fills a model with weights of another size or other classes, as far as they fit.

    The learned absolute encoding is resampled to the new grid, a head for other classes is left
    at its random start, tables that the weights do not have stay zero. All else must fit.

    Args:
        model: The model.
        weights: The weights.
        name: What to call them in errors.
        heads: The paths of layers that depend on the classes.
    """
    own = model.state_dict()
    weights = {key: value for key, value in weights.items() if not _is_replaced(key, own)}
    if "pos_embed" in weights and weights["pos_embed"].shape != own["pos_embed"].shape:
        weights["pos_embed"] = _resample(model, weights["pos_embed"])
    of_heads = {key for key in own if key.startswith(tuple(f"{head}." for head in heads))}
    fresh = {key for key in of_heads if key in weights and weights[key].shape != own[key].shape}
    fresh |= of_heads - set(weights)
    fresh |= {key for key in own if ".rpe." in key and key not in weights}
    wrong = [key for key in own if key not in fresh and not _fits(weights.get(key), own[key])]
    wrong += [key for key in weights if key not in own]
    if wrong:
        raise UserError(
            f"{name} does not fit the model in {len(wrong)} tensors, the first is {wrong[0]}: "
            f"choose the model and the encoding that it was made with"
        )
    model.load_state_dict({**own, **{k: v for k, v in weights.items() if k not in fresh}})


def _is_replaced(key: str, own: Weights) -> bool:
    return key == "pos_embed" and key not in own  # by none or a sinusoid


def _fits(weight: Tensor | None, own: Tensor) -> bool:
    return (
        weight is not None
        and weight.shape == own.shape
        and (weight.dtype == own.dtype or (weight.is_floating_point() and own.is_floating_point()))
    )


def _resample(model: Any, pos_embed: Tensor) -> Tensor:
    from timm.layers.pos_embed import resample_abs_pos_embed

    size = model.patch_embed.grid_size
    prefix = model.pos_embed.shape[1] - size[0] * size[1]
    return resample_abs_pos_embed(pos_embed.float(), list(size), num_prefix_tokens=prefix)
