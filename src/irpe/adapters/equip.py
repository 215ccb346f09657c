"""`equip`: gives an existing model its encodings, in place, in one line."""

import importlib
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

from torch import nn

from irpe.adapters.cpvt import choose_blocks, has_generator, insert
from irpe.adapters.plan import (
    Change,
    Plan,
    Request,
    Site,
    Undo,
    check_sites,
    choose_layers,
    encoding_of,
    inject,
    is_equipped,
)
from irpe.core.buckets import check_num_prefix_tokens
from irpe.core.encodings import CPVT, AnyEncoding, NoEncoding, parse_encoding
from irpe.core.grid import Grid

Model = TypeVar("Model", bound=nn.Module)

# In order: the first adapter that finds an attention takes the model.
ADAPTERS = {
    "timm": "irpe.adapters.hosts.timm.vit",
    "transformers": "irpe.adapters.hosts.transformers.saving",
    "torchvision": "irpe.adapters.hosts.torchvision",
    "torch": "irpe.adapters.hosts.torch_nn",
}
_SUPPORTED = (
    "timm's VisionTransformer with the stock attention (ViT, DeiT, DINOv2, ...) and "
    "SwinTransformer; transformers' ViT, DeiT, DINOv2 with and without registers, Swin and DETR; "
    "torchvision's VisionTransformer and SwinTransformer; torch.nn's MultiheadAttention, "
    "TransformerEncoderLayer and TransformerEncoder"
)
_CHOICES = {"absolute": ("keep", "none", "sinusoid"), "builtin_bias": ("keep", "drop")}
_EQUIPMENT = "_irpe_equipment"


@dataclass(frozen=True)
class Equipment:
    """How a model was equipped: the arguments of `equip`, which can be called with them again."""

    spec: AnyEncoding
    grid: tuple[int, ...] | None
    num_prefix_tokens: int | None
    layers: tuple[int, ...] | None
    absolute: str
    builtin_bias: str

    def to_dict(self) -> dict[str, Any]:
        """Returns the arguments as json can hold them."""
        return {**asdict(self), "spec": str(self.spec)}


def equip(
    model: Model,
    spec: AnyEncoding | str,
    grid: Grid | Sequence[int] | None = None,
    num_prefix_tokens: int | None = None,
    layers: Iterable[int] | None = None,
    absolute: str = "keep",
    builtin_bias: str = "keep",
) -> Model:
    """Gives the self-attentions of a model an encoding, in place, and returns the model.

    All tables are zero at the start, so the output is what it was. If anything is wrong, an error
    is raised and the model is what it was too.

    Args:
        model: A model of timm, transformers, torchvision or torch.nn, or one that contains such a
            model.
        spec: The encoding, or its text, for example "product-contextual-k" or "shaw"; "none" leaves
            the attentions as they are and changes the absolute encoding alone.
        grid: The shape of the grid of patches; `None` takes it from the model, input by input.
        num_prefix_tokens: How many tokens stand before the patches; `None` takes it from the model.
        layers: The numbers of the attentions to equip, counted from the input; `None` takes all,
            or for "cpvt" the first five.
        absolute: "keep" the absolute encoding, use "none", or replace it by a fixed "sinusoid".
            "cpvt" stands in its place, so there is nothing to keep: it is removed.
        builtin_bias: "keep" or "drop" the relative bias that a Swin transformer has of its own.
    """
    shape = None if grid is None else Grid.of(grid).shape
    numbers = None if layers is None else _as_tuple(layers)
    encoding = parse_encoding(spec)
    call = Equipment(encoding, shape, num_prefix_tokens, numbers, absolute, builtin_bias)
    apply_equipment(model, call)
    return model


def apply_equipment(model: nn.Module, call: Equipment) -> ExitStack:
    """Equips a model; closing what is returned undoes it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model {model!r} is not a torch.nn.Module")
    if call.num_prefix_tokens is not None:
        check_num_prefix_tokens(call.num_prefix_tokens)
    for name, choices in _CHOICES.items():
        if getattr(call, name) not in choices:
            raise ValueError(f"{name} {getattr(call, name)!r} is not one of {', '.join(choices)}")
    stands_for_absolute = isinstance(call.spec, CPVT) and call.absolute == "keep"
    absolute = "none if any" if stands_for_absolute else call.absolute
    request = Request(call.grid, call.num_prefix_tokens, absolute, call.builtin_bias)
    plan = _find(model, request)
    changes = [*plan.changes, partial(_note, model, call)]
    if plan.record is not None:
        calls = [each.to_dict() for each in (*equipment_of(model), call)]
        changes.append(partial(plan.record, calls))
    if isinstance(call.spec, CPVT):
        return insert(choose_blocks(plan.sites, call.layers), changes)
    if isinstance(call.spec, NoEncoding):
        return _change_alone(plan.sites, changes, call.layers)
    sites = choose_layers(plan.sites, call.layers)
    check_sites(sites)
    return inject(sites, changes, call.spec)


def _change_alone(
    sites: Sequence[Site], changes: Sequence[Change], layers: Sequence[int] | None
) -> ExitStack:
    """Makes the changes of a model whose attentions stay as they are."""
    if layers is not None:
        raise ValueError(f"layers {list(layers)}: encoding 'none' equips no layer, leave them out")
    for site in sites:
        if site.check is not None:
            site.check()
    return insert((), changes)


def _as_tuple(layers: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(layers)
    except TypeError:
        raise TypeError(f"layers {layers!r} is no list of numbers: write [{layers}]") from None


def equipment_of(model: nn.Module) -> tuple[Equipment, ...]:
    """Returns how a model was equipped, once for each call of `equip`."""
    return getattr(model, _EQUIPMENT, ())


def equipped_attentions(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the attentions of a model that have an encoding, by their names."""
    found = {name: module for name, module in model.named_modules() if is_equipped(module)}
    if not found:
        raise ValueError("the model has no encodings: call irpe.equip(model, spec) first")
    return found


def adapters_of(model: nn.Module) -> dict[str, Any]:
    """Returns the adapters of the libraries that a model has modules of, by the libraries."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    libraries = {kind.__module__.partition(".")[0] for kind in kinds}
    return {
        library: importlib.import_module(adapter)
        for library, adapter in ADAPTERS.items()
        if library in libraries
    }


def attentions_if_any(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the equipped attentions; there may be none where `equip` changed something else."""
    has_encodings = any(map(is_equipped, model.modules()))
    was_equipped = equipment_of(model) or equipped_blocks(model)
    return {} if was_equipped and not has_encodings else equipped_attentions(model)


def equipped_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the blocks of a model that have a generator of positions (cpvt), by their names."""
    return {name: module for name, module in model.named_modules() if has_generator(module)}


def _find(model: nn.Module, request: Request) -> Plan:
    for adapter in adapters_of(model).values():
        plan = adapter.plan(model, request)
        if plan.sites:
            return plan
    kinds = sorted({type(m).__qualname__ for m in model.modules() if "Att" in type(m).__name__})
    found = f"its attention is {', '.join(kinds)}" if kinds else "it has no attention"
    raise ValueError(
        f"{type(model).__qualname__} cannot be equipped: {found}. Supported are {_SUPPORTED}. "
        "docs/adapters.md shows how to equip an attention of your own."
    )


def _note(model: nn.Module, equipment: Equipment) -> Undo:
    """Writes down how the model was equipped, and keeps timm's optimizers from decaying tables."""
    before = dict(model.__dict__)
    setattr(model, _EQUIPMENT, (*equipment_of(model), equipment))
    if callable(getattr(model, "no_weight_decay", None)):
        model.__dict__["no_weight_decay"] = NoWeightDecay(model)

    def undo() -> None:
        for name in (_EQUIPMENT, "no_weight_decay"):
            model.__dict__.pop(name, None)
            if name in before:
                model.__dict__[name] = before[name]

    return undo


class NoWeightDecay:
    """Stands for a model's own `no_weight_decay`, which timm's optimizers ask: adds the tables.

    Args:
        model: The model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self) -> set[str]:
        """Returns the names of the parameters that do not decay."""
        return {*type(self.model).no_weight_decay(self.model), *table_names(self.model)}


def table_names(model: nn.Module) -> list[str]:
    """Returns the names of all tables in a model, and of other parameters of its encodings."""
    generators = [f"{name}.peg.{p}" for name in equipped_blocks(model) for p in ("weight", "bias")]
    return generators + [
        f"{name}.rpe.{table}".lstrip(".")
        for name, attention in attentions_if_any(model).items()
        for table, _ in encoding_of(attention).named_parameters()
    ]
