"""transformers: ViT, DeiT, DINOv2, Swin, and the encoder of DETR."""

import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deit.modeling_deit import DeiTEmbeddings, DeiTLayer
from transformers.models.detr.modeling_detr import (
    DetrEncoderLayer,
    DetrModel,
    DetrSinePositionEmbedding,
)
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings, Dinov2Layer
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
    Dinov2WithRegistersEmbeddings,
    Dinov2WithRegistersLayer,
)
from transformers.models.swin.modeling_swin import SwinEmbeddings, SwinLayer
from transformers.models.vit.modeling_vit import ViTEmbeddings, ViTLayer

from irpe.adapters.grids import RecordFeatureMap, follow_grid
from irpe.adapters.hosts.transformers.attention import (
    ForgetGrid,
    NoPositionEmbedding,
    RecordWindow,
    RPEDeiTAttention,
    RPEDetrAttention,
    RPEDinov2Attention,
    RPEDinov2WithRegistersAttention,
    RPESwinAttention,
    RPEViTAttention,
)
from irpe.adapters.plan import (
    Change,
    GridSource,
    Plan,
    Request,
    Site,
    Undo,
    check_window,
    encoding_of,
    put_absolute,
)

# Attributes that do not make another model: states, and what the configuration tells already.
PASSING = {
    "gradient_checkpointing", "name_or_path", "shift_size", "window_size", "_is_hf_initialized",
    "_output_capturing_hooks_installed", "_loss_function",
}  # fmt: skip
_POSITIONS = "position_embeddings"
# By the embeddings: the block of the model, and the class that the attention in it gets.
_VITS: dict[type[nn.Module], tuple[type[nn.Module], type[nn.Module]]] = {
    ViTEmbeddings: (ViTLayer, RPEViTAttention),
    DeiTEmbeddings: (DeiTLayer, RPEDeiTAttention),
    Dinov2Embeddings: (Dinov2Layer, RPEDinov2Attention),
    Dinov2WithRegistersEmbeddings: (Dinov2WithRegistersLayer, RPEDinov2WithRegistersAttention),
}


def plan(model: nn.Module, request: Request) -> Plan:
    """Returns the attentions of all supported transformers in a model, and what else changes."""
    found = Plan()
    for name, module in model.named_modules():
        embeddings = getattr(module, "embeddings", None)
        for kind, classes in _VITS.items():
            if isinstance(embeddings, kind):
                _plan_vit(found, module, name, request, *classes)
        if isinstance(module, DetrModel):
            _plan_detr(found, module, name, request)
        elif isinstance(module, SwinLayer):
            _plan_window(found, module, name, request)
        elif isinstance(module, SwinEmbeddings) and request.absolute != "keep":
            found.changes.append(partial(_replace_in_swin, module, request.absolute))
    if isinstance(model, PreTrainedModel):
        found.record = partial(_write_config, model.config)
    return found


def _plan_vit(
    found: Plan,
    vit: Any,
    name: str,
    request: Request,
    layer_class: type[nn.Module],
    equipped_class: type[nn.Module],
) -> None:
    patches, count = vit.embeddings.patch_embeddings, request.num_prefix_tokens
    grid = tuple(a // b for a, b in zip(patches.image_size, patches.patch_size, strict=True))
    source = GridSource(request.grid or grid)
    count = _count_prefix_tokens(vit.embeddings) if count is None else count
    layers = _modules_of(vit, name, layer_class)
    for path, layer in layers.items():
        site = _site(f"{path}.attention", layer.attention, equipped_class, count, source)
        found.sites.append(site)
    if request.grid is None:
        record = RecordFeatureMap(source)
        found.changes.append(
            partial(follow_grid, patches.projection, record, layers.values(), source)
        )
    if request.absolute != "keep":
        found.changes.append(
            partial(put_absolute, vit.embeddings, _POSITIONS, grid, request.absolute)
        )


def _modules_of(model: nn.Module, name: str, kind: type[nn.Module]) -> dict[str, Any]:
    return {path: m for path, m in model.named_modules(prefix=name) if isinstance(m, kind)}


def _count_prefix_tokens(embeddings: Any) -> int:
    names = ("cls_token", "distillation_token", "register_tokens")
    tokens = [getattr(embeddings, name, None) for name in names]
    return sum(token.shape[1] for token in tokens if token is not None)


def _plan_detr(found: Plan, detr: Any, name: str, request: Request) -> None:
    source, check = GridSource(request.grid), partial(_check_detr, detr, request)
    layers = _modules_of(detr, name, DetrEncoderLayer)
    for path, layer in layers.items():
        site = _site(f"{path}.self_attn", layer.self_attn, RPEDetrAttention, 0, source, check)
        found.sites.append(site)
    if request.grid is None:
        record = RecordFeatureMap(source)
        found.changes.append(
            partial(follow_grid, detr.input_projection, record, layers.values(), source)
        )
        found.changes.append(partial(_forget_grid, detr, source))
    if request.absolute != "keep":
        found.changes.append(partial(_replace_in_detr, detr, request.absolute))


def _check_detr(detr: Any, request: Request) -> None:
    if request.num_prefix_tokens:
        raise ValueError(
            f"num_prefix_tokens {request.num_prefix_tokens}: no tokens stand before the feature "
            "map of a DETR; leave it out"
        )
    has_sines = isinstance(detr.position_embedding, DetrSinePositionEmbedding)
    if request.absolute == "sinusoid" and has_sines:
        raise ValueError(
            "absolute 'sinusoid': this DETR has a fixed sinusoid already; use 'keep' or 'none'"
        )


def _plan_window(found: Plan, layer: Any, name: str, request: Request) -> None:
    source = GridSource((layer.window_size, layer.window_size))
    path, check = f"{name}.attention".lstrip("."), partial(check_window, request)
    changes: list[Change] = [partial(_follow_window, layer, source)]
    if request.builtin_bias == "drop":
        changes.append(partial(_drop_bias, layer.attention))
    site = _site(path, layer.attention, RPESwinAttention, 0, source, check, changes)
    found.sites.append(site)


def _site(
    name: str,
    attention: Any,
    equipped_class: type[nn.Module],
    num_prefix_tokens: int,
    grid: GridSource,
    check: Callable[[], None] | None = None,
    changes: Sequence[Change] = (),
) -> Site:
    return Site(
        name=name,
        attention=attention,
        equipped_class=equipped_class,
        num_heads=attention.q_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        num_prefix_tokens=num_prefix_tokens,
        grid=grid,
        change=partial(_make_changes, [partial(_mark_initialized, attention), *changes]),
        check=check,
    )


def _make_changes(changes: Sequence[Change]) -> Undo:
    with ExitStack() as undo:
        for change in changes:
            undo.callback(change())
        return undo.pop_all().close


def _mark_initialized(attention: nn.Module) -> Undo:
    """Tells transformers that the tables have their values: it fills what it takes for new."""
    for module in encoding_of(attention).modules():
        module.__dict__["_is_hf_initialized"] = True
    return lambda: None


def _forget_grid(detr: DetrModel, source: GridSource) -> Undo:
    return detr.register_forward_pre_hook(ForgetGrid(source), with_kwargs=True).remove


def _follow_window(layer: Any, source: GridSource) -> Undo:
    return layer.attention.register_forward_pre_hook(RecordWindow(layer, source)).remove


def _drop_bias(attention: nn.Module) -> Undo:
    modules, name = attention._modules, "relative_position_bias"
    learned = modules[name]
    modules[name] = None
    return partial(modules.__setitem__, name, learned)


def _replace_in_swin(embeddings: Any, absolute: str) -> Undo:
    if embeddings.position_embeddings is not None:
        return put_absolute(embeddings, _POSITIONS, embeddings.patch_grid, absolute)
    if absolute == "sinusoid":
        raise ValueError(
            "absolute 'sinusoid': this Swin transformer has no absolute encoding to replace; use "
            "'keep' or 'none'"
        )
    return lambda: None


def _replace_in_detr(detr: Any, absolute: str) -> Undo:
    """Takes the absolute encoding out of the encoder and of the keys of the decoder."""
    learned, dim = detr.position_embedding, detr.config.d_model
    sines = partial(DetrSinePositionEmbedding, dim // 2, normalize=True)
    detr.position_embedding = NoPositionEmbedding(dim) if absolute == "none" else sines()
    return partial(setattr, detr, "position_embedding", learned)


def _write_config(config: Any, calls: list[dict[str, Any]]) -> Undo:
    """Writes down in the configuration how the model is equipped, for `save_pretrained`."""
    before = dict(vars(config))
    config.irpe = calls

    def undo() -> None:
        del config.irpe
        if "irpe" in before:
            config.irpe = before["irpe"]

    return undo


def describe(model: nn.Module) -> dict[str, Any] | None:
    """Returns the class and the configuration of a model of transformers."""
    name = type(model).__name__
    is_known = getattr(transformers, name, None) is type(model)
    if not is_known or not isinstance(model, PreTrainedModel):
        return None
    config = json.loads(model.config.to_json_string(use_diff=False))
    config.pop("irpe", None)
    return {"class": name, "config": config}


def build(arguments: dict[str, Any]) -> nn.Module:
    """Returns the plain model of a description."""
    model_class = _model_class(arguments["class"])
    return model_class(_config(model_class, arguments["config"]))


def read_config(path: Path) -> dict[str, Any]:
    """Returns what the configuration of a saved model tells `load_equipped`: host and equipment."""
    file = path / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text())
        calls, (name, *_) = config.pop("irpe", None), config["architectures"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{file} is damaged or of another program: {error!r}") from error
    if not calls:
        raise ValueError(
            f"{file} tells of no encoding: load the model with from_pretrained, then irpe.equip it"
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
        raise ValueError(f"{name!r} is no model of transformers {transformers.__version__}")
    return found


def _config(model_class: Any, values: dict[str, Any]) -> Any:
    _refuse_code(values)
    try:
        return model_class.config_class.from_dict(dict(values))
    except (StrictDataclassError, AttributeError, TypeError) as error:
        raise ValueError(f"this is no configuration of {model_class.__name__}: {error}") from error


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
