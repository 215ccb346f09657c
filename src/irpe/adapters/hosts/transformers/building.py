"""transformers: how models are built again, from our files and from those of `save_pretrained`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from irpe.adapters.changes import Undo

# Attributes in which equal models can differ: passing state, and what the configuration says.
STATE_ATTRIBUTES = {
    "gradient_checkpointing", "name_or_path", "shift_size", "window_size", "_is_hf_initialized",
    "_output_capturing_hooks_installed", "_loss_function",
}  # fmt: skip


def write_config(config: Any, calls: list[dict[str, Any]]) -> Undo:
    """Records in the configuration how the model is equipped, for `save_pretrained`."""
    before = dict(vars(config))
    config.irpe = calls

    def undo() -> None:
        del config.irpe
        if "irpe" in before:
            config.irpe = before["irpe"]

    return undo


def describe_model(model: nn.Module) -> dict[str, Any] | None:
    """Returns the class and the configuration of a model of transformers."""
    name = type(model).__name__
    is_known = getattr(transformers, name, None) is type(model)
    if not is_known or not isinstance(model, PreTrainedModel):
        return None
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("irpe", None)
    return {"class": name, "config": config}


def build_model(arguments: dict[str, Any]) -> nn.Module:
    """Returns the plain model of a description."""
    model_class = _model_class(arguments["class"])
    return model_class(_config(model_class, arguments["config"]))


def read_config(path: Path) -> dict[str, Any]:
    """Returns the host and the equipment that the configuration of a saved model names."""
    file = path / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
        calls, (name, *_) = config.pop("irpe", None), config["architectures"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} is damaged or of another program: {error!r}") from error
    if not calls:
        raise ValueError(
            f"{file} names no encoding: load the model with from_pretrained, then irpe.equip it"
        )
    host = {"library": "transformers", "arguments": {"class": name, "config": config}}
    return {"equipment": calls, "host": host}


def read_tensors(
    path: Path, arguments: dict[str, Any], equip: Callable[[nn.Module], object]
) -> dict[str, Tensor]:
    """Returns the tensors of a saved model by the names that they have in the model.

    transformers renames tensors when it saves a model, so it has to read them itself: into a model
    that gets its tables where it is made.
    """
    model_class = _model_class(arguments["class"])

    def make(model: nn.Module, config: Any) -> None:
        model_class.__init__(model, config)
        equip(model)

    # The names count: transformers looks up by them how it renames tensors.
    body = {"__init__": make, "__module__": model_class.__module__}
    kind: Any = type(model_class.__name__, (model_class,), body)
    try:
        model, report = kind.from_pretrained(
            path,
            config=_config(model_class, arguments["config"]),
            dtype="auto",
            use_safetensors=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{path} cannot be read as a model of transformers: {error}") from error
    for problem, names in report.items():
        if names:
            raise ValueError(
                f"{path} does not fit its config.json: {problem.replace('_', ' ')} "
                f"{sorted(map(str, names))[0]} and {len(names) - 1} more"
            )
    return model.state_dict()


def _model_class(name: str) -> Any:
    found = getattr(transformers, str(name), None)
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise ValueError(f"{name!r} is not a model of transformers {transformers.__version__}")
    return found


def _config(model_class: Any, values: dict[str, Any]) -> Any:
    _refuse_code(values)
    try:
        return model_class.config_class.from_dict(dict(values))
    except (StrictDataclassError, AttributeError, TypeError) as error:
        raise ValueError(f"not a configuration of {model_class.__name__}: {error}") from error


def _refuse_code(values: dict[str, Any]) -> None:
    """Raises an error if a configuration chooses something that may be fetched and run."""
    for name, value in values.items():
        if name.endswith("_implementation") or name in ("auto_map", "quantization_config"):
            raise ValueError(
                f"{name} = {value!r} in a configuration may name code to fetch and run: remove it, "
                "and choose it when the model is loaded"
            )
        if isinstance(value, dict):
            _refuse_code(value)
