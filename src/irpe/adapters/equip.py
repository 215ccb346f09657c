"""`equip` and `unequip`: give a model its encodings, in place, and take them out again."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from irpe.adapters.answer import equipped_class
from irpe.adapters.checks import check_rotation, check_sites, check_untouched
from irpe.adapters.cpvt import choose_blocks, insert_generator
from irpe.adapters.equipped import EQUIPMENT, Equipment, equipment_of, table_names
from irpe.adapters.grids import augment_positions
from irpe.adapters.host import Plan, Site, choose_layers
from irpe.adapters.hosts import hosts_of
from irpe.adapters.refusals import refusal_of
from irpe.adapters.swaps import (
    Swap,
    apply_change,
    put_module,
    set_attribute,
    set_class,
    undo_change,
)
from irpe.core.augmentation import NONE
from irpe.core.buckets import check_num_prefix_tokens
from irpe.core.encodings import AnyEncoding, Encoding, parse_encoding
from irpe.core.encodings.model_only import CPVT, NoEncoding
from irpe.core.grid import Grid
from irpe.errors import UserError, UserTypeError
from irpe.nn.tables import RelativePositionEncoding

Model = TypeVar("Model", bound=nn.Module)

_CHANGES = (
    "_irpe_changes"  # the attribute of a model that holds the changes of each call of `equip`
)
LACKS = "_irpe_lacks"  # the attribute of a model that was built without what equipping removes
_CHOICES = {"absolute": ("keep", "none", "sinusoid"), "builtin_bias": ("keep", "drop", "convert")}


def equip(
    model: Model,
    spec: AnyEncoding | str,
    grid: Grid | Sequence[int] | None = None,
    num_prefix_tokens: int | None = None,
    layers: Iterable[int] | None = None,
    absolute: str = "keep",
    builtin_bias: str = "keep",
    impl: str = "auto",
) -> Model:
    """Gives the self-attentions of a model an encoding, in place, and returns the model.

    All tables are zero at the start, so the output is unchanged. If anything is wrong, an error is
    raised and the model is unchanged too.

    Args:
        model: A model of timm, transformers, torchvision or torch.nn, or one that contains such a
            model.
        spec: The encoding, or its text, for example "product-contextual-k" or "shaw"; "none" leaves
            the attentions as they are and changes the absolute encoding alone.
        grid: The shape of the grid of patches; `None` takes it from the model, input by input.
        num_prefix_tokens: How many tokens stand before the patches; `None` takes it from the model.
        layers: The indices of the attentions to equip, counted from the input; `None` takes all,
            or for "cpvt" the first five.
        absolute: "keep" the absolute encoding, use "none", or replace it by a fixed "sinusoid".
            "cpvt" takes its place, so there is nothing to keep: it is removed.
        builtin_bias: "keep" or "drop" the relative encoding that a model such as Swin or BEiT has
            of its own; or "convert" that of SAM or ViTDet into our tables, which compute the same.
        impl: Which implementation of `irpe.rpe_attention` the attentions use.

    Examples:
        >>> import irpe, timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> model = irpe.equip(model, "product-contextual-k", absolute="none")
    """
    shape = None if grid is None else Grid.of(grid).shape
    indices = None if layers is None else _as_tuple(layers)
    encoding = parse_encoding(spec)
    call = Equipment(encoding, shape, num_prefix_tokens, indices, absolute, builtin_bias, impl)
    remember_changes(model, [apply_equipment(model, call)])
    return model


def apply_equipment(model: nn.Module, call: Equipment) -> list[Swap]:
    """Equips a model, all of it or nothing, and returns the change, which can be undone."""
    if not isinstance(model, nn.Module):
        raise UserTypeError(f"model is a {type(model).__qualname__}, not a torch.nn.Module")
    if call.num_prefix_tokens is not None:
        check_num_prefix_tokens(call.num_prefix_tokens)
    for name, choices in _CHOICES.items():
        if getattr(call, name) not in choices:
            raise UserError(f"{name} {getattr(call, name)!r} is not one of {', '.join(choices)}")
    if call.impl != "auto" and isinstance(call.spec, CPVT | NoEncoding):
        raise UserError(
            f"impl {call.impl!r}: encoding '{call.spec}' leaves attention as it is, so there is "
            "nothing to choose; leave impl out"
        )
    check_untouched(model)
    with torch.inference_mode(False):  # parameters made in that mode could never be trained
        change = _plan_change(model, call)
    apply_change(change)
    return change


def _plan_change(model: nn.Module, call: Equipment) -> list[Swap]:
    """Returns what equips a model, which stays as it is."""
    replaces_absolute = isinstance(call.spec, CPVT) and call.absolute == "keep"
    plan = find_attentions(model, replace(call, absolute="none") if replaces_absolute else call)
    _check_builtin_bias(model, plan, call)
    change = [*_changes_of_layers(plan.sites, call), *plan.changes]
    if isinstance(call.spec, Encoding) and call.spec.augmentation != NONE:
        chosen = [site.attention for site in choose_layers(plan.sites, call.layers)]
        change += augment_positions(model, change, chosen)
    change += set_attribute(model, EQUIPMENT, (*equipment_of(model), call))
    own: Any = getattr(model, "no_weight_decay", None)
    if callable(own):
        change += set_attribute(model, "no_weight_decay", NoWeightDecay(model, own))
    if plan.record is not None:
        calls = [each.to_dict() for each in (*equipment_of(model), call)]
        change += plan.record(calls)
    return change


def _check_builtin_bias(model: nn.Module, plan: Plan, call: Equipment) -> None:
    """Raises an error if there is nothing to drop or convert, or nothing that would do it."""
    choice, kind = call.builtin_bias, type(model).__qualname__
    if choice == "keep":
        return
    if not any(site.has_builtin_bias for site in plan.sites):
        raise UserError(
            f"builtin_bias {choice!r}: {kind} has no relative encoding of its own, as Swin "
            "transformers have; use 'keep'"
        )
    if choice == "convert" and not all(site.is_decomposed for site in plan.sites):
        raise UserError(
            f"builtin_bias 'convert': the relative encoding of {kind} is not a vector for each "
            "offset of each axis, as those of SAM and ViTDet are; use 'keep' or 'drop'"
        )
    if isinstance(call.spec, CPVT | NoEncoding):
        raise UserError(
            f"builtin_bias {choice!r}: encoding '{call.spec}' leaves attention as it is; use 'keep'"
        )


def _changes_of_layers(sites: Sequence[Site], call: Equipment) -> list[Swap]:
    """Returns what equips the chosen attentions, or the blocks around them."""
    if isinstance(call.spec, CPVT):
        chosen = choose_blocks(sites, call.layers)
        return [swap for site in chosen for swap in insert_generator(site)]
    if isinstance(call.spec, NoEncoding):
        if call.layers is not None:
            raise UserError(
                f"layers {list(call.layers)}: encoding 'none' equips no layer, leave them out"
            )
        for site in sites:
            if site.check is not None:
                site.check()
        return []
    chosen = choose_layers(sites, call.layers)
    check_sites(chosen)
    check_rotation(chosen, call.spec)
    return [swap for site in chosen for swap in _equip_site(site, call)]


def _equip_site(site: Site, call: Equipment) -> list[Swap]:
    """Returns what gives an attention an encoding and the class whose forward uses it."""
    spec: Any = call.spec
    attention, like = site.attention, next(site.attention.parameters())
    size = site.num_heads, site.head_dim, site.num_prefix_tokens, site.ndim
    encoding = RelativePositionEncoding(spec, *size, like.device, like.dtype, call.impl)
    encoding.train(attention.training)
    for prepare in site.prepare:
        prepare(encoding)
    swaps = [*put_module(attention, "rpe", encoding), *site.changes]
    if hasattr(attention, "fused_attn"):  # timm's switch to the call that is answered
        swaps += set_attribute(attention, "fused_attn", True)
    return [*swaps, *set_class(attention, equipped_class(type(attention)))]


def _as_tuple(layers: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(layers)
    except TypeError:
        raise UserTypeError(
            f"layers {layers!r} is not a list of indices: write [{layers}]"
        ) from None


def find_attentions(model: nn.Module, call: Equipment) -> Plan:
    """Returns what the first host that knows a model finds in it, or raises an error.

    Attentions of other libraries in the same model are named in a warning; those of torch.nn are
    not, for they need a grid of their own.
    """
    hosts = hosts_of(model)
    for name, host in hosts.items():
        plan = host.find_attentions(model, call)
        if plan.sites:
            others = [other for other in hosts if other not in (name, "torch")]
            _warn_of_others(model, plan, [hosts[other] for other in others], call)
            return plan
    raise UserError(refusal_of(model))


def _warn_of_others(model: nn.Module, plan: Plan, hosts: Sequence[Any], call: Equipment) -> None:
    found = {id(site.attention) for site in plan.sites}
    for host in hosts:
        try:
            sites = host.find_attentions(model, call).sites
        except (TypeError, ValueError):
            continue  # that library's models cannot have what was asked for
        left = [site.name for site in sites if id(site.attention) not in found]
        if left:
            warnings.warn(
                f"{len(left)} attentions of another library stay as they are, {left[0]} first: "
                "equip the part of the model with these by itself",
                stacklevel=5,
            )


class NoWeightDecay:
    """Replaces a model's own `no_weight_decay`, which timm's optimizers call: adds the tables."""

    def __init__(self, model: nn.Module, own: Any) -> None:
        self.model, self.own = model, own

    def __call__(self) -> set[str]:
        """Returns the names of the parameters that do not decay."""
        return {*self.own(), *table_names(self.model)}


def changes_of(model: nn.Module) -> list[list[Swap]]:
    """Returns the changes of each call of `equip`, as far as they are known."""
    return vars(model).get(_CHANGES, [])


def remember_changes(model: nn.Module, changes: Sequence[list[Swap]]) -> None:
    """Keeps the changes of calls of `equip` with a model, for `unequip`."""
    vars(model)[_CHANGES] = [*changes_of(model), *changes]


def unequip(model: nn.Module) -> dict[str, Tensor]:
    """Makes an equipped model what it was before `equip`, and returns its tables by name.

    All calls of `equip` are undone. What they removed (an absolute encoding, a built-in bias) is
    put back with the values that it had; everything else that was trained since stays.

    Args:
        model: A model that `equip` returned, or a copy of one. One that `load_equipped` built after
            something had been removed from it cannot be what it was: an error says so.

    Examples:
        >>> import irpe, timm
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=2)
        >>> tables = irpe.unequip(irpe.equip(model, "product-contextual-k"))
        >>> list(tables)
        ['blocks.0.attn.rpe.key_tables.0', 'blocks.1.attn.rpe.key_tables.0']
    """
    calls = equipment_of(model)
    if not calls:
        raise UserError("the model has no encodings: there is nothing to unequip")
    if len(changes_of(model)) != len(calls) or vars(model).get(LACKS):
        raise UserError(
            f"this {type(model).__qualname__} was built from a saved one, which has no "
            f"{' and no '.join(removed_by(calls))} any more: unequip the model that was saved, or "
            "load it into a plain model that has them, irpe.load_equipped(path, model=plain)"
        )
    tables = {name: model.get_parameter(name).detach() for name in table_names(model)}
    undo_equipment(model)
    return tables


def undo_equipment(model: nn.Module) -> None:
    """Makes an equipped model what it was, or one that has what it lacks with any values."""
    like, before = next(model.parameters()), set(model.state_dict())
    for change in reversed(changes_of(model)):
        undo_change(change)
    vars(model).pop(_CHANGES, None)
    _move_what_came_back(model, before, like)


def removed_by(calls: Sequence[Equipment]) -> list[str]:
    """Returns what equipping took out of the model, in words."""
    removed: list[str] = []
    if any(call.absolute != "keep" or str(call.spec) == "cpvt" for call in calls):
        removed.append("absolute encoding")
    if any(call.builtin_bias != "keep" for call in calls):
        removed.append("relative encoding of its own")
    return removed


def _move_what_came_back(model: nn.Module, before: set[str], like: Tensor) -> None:
    """Gives tensors that were put back the device and dtype that the model has got meanwhile."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in before and tensor.is_floating_point():
                tensor.data = tensor.data.to(like.device, like.dtype)
