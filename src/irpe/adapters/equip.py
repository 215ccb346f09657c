"""`equip`: gives an existing model its encodings, in place, in one line."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

from torch import nn

from irpe.adapters.changes import Change, Undo, apply_changes, equip_attention, set_attribute
from irpe.adapters.cpvt import choose_blocks, insert_generator
from irpe.adapters.equipped import EQUIPMENT, Equipment, equipment_of, table_names
from irpe.adapters.hosts import hosts_of
from irpe.adapters.plan import (
    Plan,
    Request,
    Site,
    check_rotation,
    check_sites,
    check_untouched,
    choose_layers,
)
from irpe.adapters.refusals import refusal_of
from irpe.adapters.unequip import remember_undo
from irpe.core.buckets import check_num_prefix_tokens
from irpe.core.encodings import CPVT, AnyEncoding, Encoding, NoEncoding, parse_encoding
from irpe.core.grid import Grid
from irpe.core.positions import axes_of
from irpe.errors import UserError, UserTypeError
from irpe.nn.encoding import RelativePositionEncoding

Model = TypeVar("Model", bound=nn.Module)

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
    remember_undo(model, apply_equipment(model, call))
    return model


def apply_equipment(model: nn.Module, call: Equipment) -> ExitStack:
    """Equips a model, all of it or nothing; closing what is returned undoes it."""
    if not isinstance(model, nn.Module):
        raise UserTypeError(f"model {model!r} is not a torch.nn.Module")
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
    plan = find_attentions(model, _request_of(call))
    _check_builtin_bias(model, plan, call)
    changes = [*_changes_of_layers(plan.sites, call), *plan.changes]
    changes.append(partial(_record_equipment, model, call))
    if plan.record is not None:
        calls = [each.to_dict() for each in (*equipment_of(model), call)]
        changes.append(partial(plan.record, calls))
    return apply_changes(changes)


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


def _request_of(call: Equipment) -> Request:
    replaces_absolute = isinstance(call.spec, CPVT) and call.absolute == "keep"
    return Request(
        call.grid,
        call.num_prefix_tokens,
        absolute="none" if replaces_absolute else call.absolute,
        builtin_bias=call.builtin_bias,
        requires_absolute=not replaces_absolute,
        layers=call.layers,
    )


def _changes_of_layers(sites: Sequence[Site], call: Equipment) -> list[Change]:
    """Returns what equips the chosen attentions, or the blocks around them."""
    if isinstance(call.spec, CPVT):
        return [partial(insert_generator, site) for site in choose_blocks(sites, call.layers)]
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
    changes: list[Change] = []
    for site in chosen:
        changes += [partial(_equip_site, site, call.spec, call.impl), *site.changes]
    return changes


def _equip_site(site: Site, spec: Encoding, impl: str) -> Undo:
    encoding = _make_encoding(site, spec, impl)
    return equip_attention(site.attention, site.equipped_class, encoding, site.grid)


def _make_encoding(site: Site, spec: Encoding, impl: str) -> RelativePositionEncoding:
    like = next(site.attention.parameters())
    ndim = 2 if site.grid.grid is None else axes_of(site.grid.grid)
    size = site.num_heads, site.head_dim, site.num_prefix_tokens, ndim
    encoding = RelativePositionEncoding(spec, *size, like.device, like.dtype, impl)
    return encoding.train(site.attention.training)


def _as_tuple(layers: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(layers)
    except TypeError:
        raise UserTypeError(
            f"layers {layers!r} is not a list of indices: write [{layers}]"
        ) from None


def find_attentions(model: nn.Module, request: Request) -> Plan:
    """Returns what the first host that knows a model finds in it, or raises an error.

    Attentions of other libraries in the same model are named in a warning; those of torch.nn are
    not, for they need a grid of their own.
    """
    hosts = hosts_of(model)
    for name, host in hosts.items():
        plan = host.find_attentions(model, request)
        if plan.sites:
            others = [other for other in hosts if other not in (name, "torch")]
            _warn_of_others(model, plan, [hosts[other] for other in others], request)
            return plan
    raise UserError(refusal_of(model))


def _warn_of_others(model: nn.Module, plan: Plan, hosts: Sequence[Any], request: Request) -> None:
    found = {id(site.attention) for site in plan.sites}
    for host in hosts:
        try:
            sites = host.find_attentions(model, request).sites
        except (TypeError, ValueError):
            continue  # that library's models cannot have what was asked for
        left = [site.name for site in sites if id(site.attention) not in found]
        if left:
            warnings.warn(
                f"{len(left)} attentions of another library stay as they are, {left[0]} first: "
                "equip the part of the model with these by itself",
                stacklevel=4,
            )


def _record_equipment(model: nn.Module, call: Equipment) -> Undo:
    """Records how the model was equipped, and keeps timm's optimizers from decaying tables."""
    undo_calls = set_attribute(model, EQUIPMENT, (*equipment_of(model), call))
    own: Any = getattr(model, "no_weight_decay", None)
    if not callable(own):
        return undo_calls
    undo_decay = set_attribute(model, "no_weight_decay", NoWeightDecay(model, own))

    def undo() -> None:
        undo_decay()
        undo_calls()

    return undo


class NoWeightDecay:
    """Replaces a model's own `no_weight_decay`, which timm's optimizers call: adds the tables.

    Args:
        model: The model.
        own: What is replaced: a method, or a function that the model or one in it was given.
    """

    def __init__(self, model: nn.Module, own: Callable[[], Any]) -> None:
        self.model, self.own = model, own

    def __call__(self) -> set[str]:
        """Returns the names of the parameters that do not decay."""
        return {*self.own(), *table_names(self.model)}
