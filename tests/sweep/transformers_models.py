"""Which of transformers' models with images as input can be equipped, and if not, why.

A model is built on the meta device, where its size does not matter, and equipped there. What is
equipped is then run: the smallest part of the model that takes images, with few layers and real
weights, before and after its tables are filled.
"""

import copy
import inspect
import logging
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

import irpe
from irpe.adapters.equipped import equipped_attentions, table_names

from .page import OtherRow
from .resizing import try_resize
from .verdicts import Verdicts

SPEC = "product-contextual-k"
FEW = 2  # layers
MOST_PARAMETERS = 100_000_000  # of a part that is run
TRIED: dict[tuple[type, str], tuple[str, str]] = {}
DEPTHS = {
    "num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "depth", "n_layers",
    "num_encoder_layers", "num_decoder_layers", "text_layers", "n_layer",
}  # fmt: skip


def verdicts(known: Verdicts) -> Iterator[OtherRow]:
    """Yields the rows of the page."""
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names_of_classes():
            kind = getattr(transformers, name)
            if takes_images(kind):
                model_type = getattr(kind.config_class, "model_type", "") or kind.__module__
                yield (name, model_type, *known.of(name, partial(judge, kind)))
    logging.disable(logging.NOTSET)


def names_of_classes() -> list[str]:
    """Returns the classes that the automatic mappings name and whose files know pixel_values."""
    names: set[str] = set()
    for mapping_name, mapping in vars(modeling_auto).items():
        if mapping_name.endswith("_MAPPING_NAMES"):
            for found in mapping.values():
                names |= {found} if isinstance(found, str) else set(found)
    modules, root = transformers._class_to_module, Path(transformers.__file__).parent
    files = {
        name: root / (modules[name].replace(".", "/") + ".py") for name in names & set(modules)
    }
    known = {file: "pixel_values" in file.read_text() for file in {*files.values()}}
    return sorted(name for name, file in files.items() if known[file])


def takes_images(kind: object) -> bool:
    """Returns whether a class is a model whose forward takes pixel_values."""
    if not isinstance(kind, type) or not issubclass(kind, PreTrainedModel):
        return False  # a stand-in for a library that is not installed
    return "pixel_values" in inspect.signature(kind.forward).parameters


def judge(kind: type[PreTrainedModel]) -> tuple[str, str, str]:
    """Returns the verdict on a class, whether it can be resized, and a sentence."""
    try:
        model = build(kind)
    except Exception as error:  # whatever a configuration lacks
        return "not built", "", first_line(error)
    try:
        irpe.equip(model, SPEC)
    except ValueError as error:
        return "refused", "", str(error).partition(". Supported are")[0]
    attentions = equipped_attentions(model)
    classes = sorted({type(each).__base__.__name__ for each in attentions.values()})
    parts = [try_out(type(part), part.config) for part in parts_of(model)]
    done = "; ".join(dict.fromkeys(done for done, _ in parts))
    resized = "; ".join(dict.fromkeys(resized for _, resized in parts if resized))
    return "equipped", resized, f"{', '.join(classes)}; {done}"


def build(kind: type[PreTrainedModel]) -> PreTrainedModel:
    """Returns a model on the meta device, with few layers if its configuration allows that."""
    for config in (with_few_layers(kind.config_class()), kind.config_class()):
        try:
            with torch.device("meta"):
                return kind(config)
        except Exception as error:
            failure = error
    raise failure


def with_few_layers(config: PreTrainedConfig) -> PreTrainedConfig:
    """Returns a configuration with few layers, in all of its parts."""
    config = copy.deepcopy(config)
    if hasattr(config, "stage_names"):  # whose outputs are counted by layers
        return config
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            setattr(config, name, with_few_layers(value))
        elif name in DEPTHS and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, min(value, FEW))
    return config


def parts_of(model: PreTrainedModel) -> list[PreTrainedModel]:
    """Returns the smallest models in a model that take images and have equipped attentions."""
    names = equipped_attentions(model)
    holders = {
        path: part
        for path, part in model.named_modules()
        if takes_images(type(part))
        and any(name == path or name.startswith(f"{path}.".lstrip(".")) for name in names)
    }
    return [
        part
        for path, part in holders.items()
        if not any(other != path and other.startswith(f"{path}.".lstrip(".")) for other in holders)
    ]


def try_out(kind: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[str, str]:
    """Returns what a part does with tables, in a clause, and whether it can be resized."""
    key = (kind, config.to_json_string(use_diff=False))
    if key not in TRIED:
        TRIED[key] = _try_out(kind, copy.deepcopy(config))
    return TRIED[key]


def _try_out(kind: type[PreTrainedModel], config: PreTrainedConfig) -> tuple[str, str]:
    if hasattr(config, "irpe"):
        del config.irpe
    with torch.device("meta"):
        count = sum(p.numel() for p in kind(config).parameters())
    if count > MOST_PARAMETERS:
        return f"{kind.__name__} not run, as it has {count / 1e6:.0f} million parameters", ""
    try:
        torch.manual_seed(0)
        model = kind(config).eval()
        fill(dict(model.named_parameters()), 0.02)
        image = torch.randn(1, *image_shape(config))
        plain = outputs(model, image)
    except Exception as error:
        return f"{kind.__name__} not run: {first_line(error)}", ""
    irpe.equip(model, SPEC, impl="fast")  # detectors rank queries: compiled kernels round otherwise
    same = outputs(model, image)
    fill({name: model.get_parameter(name) for name in table_names(model)}, 1.0)
    changed = outputs(model, image)
    if not torch.allclose(same, plain, rtol=1e-3, atol=1e-3 * float(plain.abs().max())):
        raise AssertionError(f"{kind.__name__}: zero tables change the output")
    if torch.allclose(changed, same, rtol=1e-6, atol=0):
        raise AssertionError(f"{kind.__name__}: random tables do not change the output")
    grids = {str(each.grid) for each in irpe.summary(model).attentions}
    done = f"{kind.__name__} on a grid of {', '.join(sorted(grids))}"
    return done, try_resize(model, image.shape[-2:])


def fill(parameters: dict[str, torch.Tensor], std: float) -> None:
    """Moves parameters, so that none hides the attention."""
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.add_(std * torch.randn_like(parameter))


def image_shape(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Returns channels, rows and columns of an image that a model is configured for."""
    size = getattr(config, "image_size", 224)
    rows, columns = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    return getattr(config, "num_channels", 3), rows, columns


@torch.no_grad()
def outputs(model: PreTrainedModel, image: torch.Tensor) -> torch.Tensor:
    """Returns all tensors that a model makes of an image, in one."""
    torch.manual_seed(0)
    values = list(model(pixel_values=image).to_tuple())
    found: list[torch.Tensor] = []
    while values:
        value = values.pop(0)
        if isinstance(value, tuple | list):
            values += value
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            found.append(value.flatten())
    return torch.cat(found)


def first_line(error: Exception) -> str:
    """Returns the kind of an error and its first line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"
