"""transformers: how models are built again, from our files and from those of `save_pretrained`."""

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from irpe.adapters.swaps import Swap, set_attribute
from irpe.errors import UserError

# Around these values of a saved configuration: AutoModel refuses the first, all stock classes the
# second, and their errors show what they refuse.
_REFUSED = ("model_type", "dtype")
_MARK, _REMEDY = "irpe_", ": load it with irpe.load_equipped"


def write_config(model: Any, calls: list[dict[str, Any]]) -> list[Swap]:
    """Returns what records in the configuration how a model is equipped, for `save_pretrained`."""
    saving = set_attribute(model, "save_pretrained", SavePretrained(model))
    return [*set_attribute(model.config, "irpe", calls), *saving]


class SavePretrained:
    """Replaces the method `save_pretrained` of an equipped model.

    What it writes is not for stock classes, which would drop the tables: `config.json` has values
    that they refuse, with our remedy in them. Tensors keep the names that
    they have in the model, not those of earlier releases of transformers: `Trainer` loads its
    checkpoints by these, and would skip what has another name.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Saves the model; arguments as those of the method."""
        kwargs.setdefault("save_original_format", False)
        config = self.model.config
        stock_class = type(config)
        config.__class__ = _equipped_config_class(stock_class)
        try:
            return type(self.model).save_pretrained(self.model, *args, **kwargs)
        finally:
            config.__class__ = stock_class


@cache
def _equipped_config_class(stock_class: Any) -> Any:
    """Returns a subclass of a configuration, written with values that stock classes refuse."""

    def to_json_string(self: Any, *args: Any, **kwargs: Any) -> str:
        values = json.loads(stock_class.to_json_string(self, *args, **kwargs))
        values["model_type"] = stock_class.model_type
        values |= {name: f"{_MARK}{values.get(name)}{_REMEDY}" for name in _REFUSED}
        return json.dumps(values, indent=2, sort_keys=True) + "\n"

    names = ("__doc__", "__module__", "__qualname__")
    body = {name: getattr(stock_class, name) for name in names}
    return type(stock_class.__name__, (stock_class,), {**body, "to_json_string": to_json_string})


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
        raise UserError(f"{file} is damaged or of another program: {error!r}") from error
    if not calls:
        raise UserError(
            f"{file} names no encoding: load the model with from_pretrained, then irpe.equip it"
        )
    for key in _REFUSED:
        if isinstance(value := config.get(key), str):
            own = value.removeprefix(_MARK).removesuffix(_REMEDY)
            config[key] = None if own == "None" else own
    host = {"library": "transformers", "arguments": {"class": name, "config": config}}
    return {"equipment": calls, "host": host}


def read_tensors(
    path: Path,
    arguments: dict[str, Any],
    equip: Callable[[nn.Module], object],
    plain: nn.Module | None = None,
) -> dict[str, Tensor]:
    """Returns the tensors of a saved model by the names that they have in the model.

    transformers renames tensors when it saves a model, so it has to read them itself: into a model
    that gets its tables where it is made. `plain`, for classes that are not of transformers, is a
    model like the saved one; it stays as it is.
    """
    model_class: Any = _model_class(arguments["class"]) if plain is None else _class_of(plain)

    def make(model: nn.Module, config: Any) -> None:
        if plain is None:
            model_class.__init__(model, config)
        else:
            vars(model).update(vars(_without_values(plain)))
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
        raise UserError(f"{path} cannot be read as a model of transformers: {error}") from error
    fits = "its config.json" if plain is None else f"the {model_class.__qualname__} in model="
    for problem, names in report.items():
        if names:
            raise UserError(
                f"{path} does not fit {fits}: {problem.replace('_', ' ')} "
                f"{sorted(map(str, names))[0]} and {len(names) - 1} more"
            )
    return _in_saved_dtypes(path, model.state_dict())


def _in_saved_dtypes(path: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns tensors as they are in the files: transformers reads all of them in one dtype."""
    saved = dict(tensors)
    for file in path.glob("model*.safetensors"):
        # One that is damaged is not of this model: transformers has read all that are.
        with suppress(SafetensorError), safe_open(file, framework="pt") as opened:
            for name in tensors.keys() & set(opened.keys()):
                tensor, read = opened.get_tensor(name), tensors[name]
                if tensor.dtype != read.dtype and torch.equal(tensor.to(read.dtype), read):
                    saved[name] = tensor
    return saved


def _without_values(model: nn.Module) -> nn.Module:
    """Returns a copy of a model with parameters on the meta device."""
    memo: dict[int, Any] = {
        id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()
    }
    return copy.deepcopy(model, memo)


def _class_of(model: nn.Module) -> type[nn.Module]:
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"model= is of {type(model).__qualname__}, and the directory of a model of "
            "transformers: pass a plain model of the class that was saved"
        )
    return type(model)


def _model_class(name: str) -> Any:
    found = getattr(transformers, str(name), None)
    if not isinstance(found, type) or not issubclass(found, PreTrainedModel):
        raise UserError(
            f"{name!r} is not a model of transformers {transformers.__version__}: if it is a class "
            "of your own, build the plain model and pass it, irpe.load_equipped(path, model=plain)"
        )
    return found


def _config(model_class: Any, values: dict[str, Any]) -> Any:
    _refuse_code(values)
    try:
        return model_class.config_class.from_dict(dict(values))
    except (StrictDataclassError, AttributeError, TypeError) as error:
        raise UserError(f"not a configuration of {model_class.__name__}: {error}") from error


def _refuse_code(values: dict[str, Any]) -> None:
    """Raises an error if a configuration chooses something that may be fetched and run."""
    for name, value in values.items():
        if name.endswith("_implementation") or name in ("auto_map", "quantization_config"):
            raise UserError(
                f"{name} = {value!r} in a configuration may name code to fetch and run: remove it, "
                "and choose it when the model is loaded"
            )
        if isinstance(value, dict):
            _refuse_code(value)
