"""Weights that transformers or timm publish, for Segformer and for UperNet or its backbone."""

import json
import re
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig
from transformers.models.timm_backbone import TimmBackbone
from transformers.utils import logging

from irpe.errors import UserError
from irpe.hub import cached_if_unreachable
from irpe.tasks.transformers_arguments import own_arguments

_FRESH = ("decode_head.", "hidden_states_norms.", "fpn.")  # what classifiers do not have
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def is_pretrained(initial: str) -> bool:
    """Returns whether initial weights are read by transformers or timm: not a run or a file.

    They are where they are called so, in a folder that `save_pretrained` wrote, or at the hub.
    """
    path = Path(initial)
    is_name = not path.exists() and _HUB_NAME.fullmatch(initial) is not None
    return initial == "pretrained" or is_name or (path / "config.json").is_file()


def fill_pretrained(network: Any, initial: str) -> None:
    """Fills a network, or its backbone, with published weights; a head for other classes is new."""
    with nullcontext() if Path(initial).exists() else cached_if_unreachable():
        _fill_from(network, initial)


def _fill_from(network: Any, initial: str) -> None:
    if initial == "pretrained":
        _fill_timm(network.backbone)
        return
    if _model_type(Path(initial)).startswith("irpe_"):
        raise UserError(
            f"initial {initial!r} was saved by an equipped model: pass the folder of its run"
        )
    try:
        theirs = AutoConfig.from_pretrained(initial)
    except (OSError, ValueError) as error:
        raise UserError(
            f"initial {initial!r} is neither a run, a file, nor a folder that save_pretrained "
            f"wrote, and cannot be had from the hub: {error}"
        ) from error
    parts = {
        part.config.model_type: part for part in (getattr(network, "backbone", network), network)
    }
    if theirs.model_type not in parts:
        raise UserError(
            f"initial {initial!r} holds a {theirs.model_type}, not a {' or '.join(parts)}"
        )
    _fill(parts[theirs.model_type], theirs, initial)


def _fill_timm(backbone: Any) -> None:
    name = backbone.config.backbone
    try:
        filled: Any = TimmBackbone(backbone.config, pretrained=True)
    except Exception as error:  # whatever the network, the hub or a proxy raises
        raise UserError(
            f"the pretrained weights of {name} cannot be downloaded: {error}; leave initial out, "
            "or name a file"
        ) from error
    backbone.load_state_dict(filled.state_dict())


def _fill(part: Any, theirs: Any, initial: str) -> None:
    try:
        with _silent():  # it warns of a new head, and the rest is checked below
            loaded, report = type(part).from_pretrained(
                initial,
                config=part.config,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (OSError, RuntimeError, ValueError) as error:
        raise UserError(f"initial {initial!r} cannot be read: {error}") from error
    missing = {*report["missing_keys"], *(key for key, *_ in report["mismatched_keys"])}
    missing |= {key for key in report["unexpected_keys"] if _is_of_layer(key)}
    wrong = sorted(key for key in missing if not key.startswith(_FRESH))
    if wrong:
        raise UserError(
            f"initial {initial!r} does not fit the model in {len(wrong)} tensors, the first is "
            f"{wrong[0]}: it was made with {_differences(part.config, theirs)}, set model_args so"
        )
    part.load_state_dict(loaded.state_dict())


def _model_type(folder: Path) -> str:
    """Returns what the configuration in a folder says that its model is, if it can be read."""
    try:
        return str(json.loads((folder / "config.json").read_text()).get("model_type"))
    except (OSError, ValueError, AttributeError):
        return ""


def _is_of_layer(key: str) -> bool:
    """Returns whether a tensor is of a numbered layer: heads that are left out have none."""
    heads = ("classifier", "auxiliary_head")
    return not key.startswith(heads) and any(name.isdigit() for name in key.split("."))


@contextmanager
def _silent() -> Generator[None]:
    """Keeps transformers from reporting what it loads."""
    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()


def _differences(own: Any, theirs: Any) -> dict[str, Any]:
    """Returns the arguments of a configuration that another one has otherwise, as it has them."""
    ours, other = own.to_dict(), theirs.to_dict()
    names = sorted(own_arguments(type(own)) & set(other) - {"drop_path_rate"})
    return {name: other[name] for name in names if other[name] != ours.get(name)}
