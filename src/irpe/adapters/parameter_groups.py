"""The parameters of a model in groups for an optimizer: weight decay, and a rate for tables."""

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import compress
from numbers import Real
from typing import Any, cast

import torch
from torch import nn

from irpe.adapters.equipped import table_names
from irpe.core.learning_rates import TABLE_LR
from irpe.errors import UserError, UserTypeError

_TABLE_LR = "table_lr"  # of a group: that its tables have their rate, and which


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    lr: float | None = None,
    table_lr: float | None = None,
) -> list[dict[str, Any]]:
    """Returns groups for an optimizer: parameters that decay, those that do not, and the tables.

    Tables do not decay, nor do biases, norms and what the own `no_weight_decay` of the model, or of
    a model in it, names.
    They start at zero, and Adam moves an element by at most the learning rate in a step: in a short
    training they need a higher rate than the weights, and in a fine-tuning of some hundred steps
    usual rates get them nowhere (`irpe.make_relative` solves for tables). Groups carry it as `lr`,
    which the schedulers of torch and timm keep in proportion to the model's; that of the tables
    notes its multiple as `table_lr`, which no optimizer reads. A plain model gets the same groups
    without tables, so that a comparison with it needs no other line.

    Args:
        model: An equipped model, or a wrapper of one: call it after `irpe.equip`, or the tables are
            not trained.
        weight_decay: The decay of the first group.
        lr: The learning rate of the model. Without it the groups carry no rate, and tables learn at
            the optimizer's own, in the second group.
        table_lr: The learning rate of the tables, as a multiple of `lr`
            (`irpe.core.learning_rates`).

    Examples:
        >>> import irpe, timm, torch
        >>> model = irpe.equip(timm.create_model("vit_tiny_patch16_224", depth=1), "product-bias-k")
        >>> optimizer = torch.optim.AdamW(irpe.parameter_groups(model, 0.05, lr=1e-4))
        >>> sorted({group["lr"] for group in optimizer.param_groups})
        [0.0001, 0.0005]
    """
    rates = {"lr": lr, "table_lr": table_lr}
    given = {name: value for name, value in rates.items() if value is not None}
    _check_numbers(weight_decay=weight_decay, **given)
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise UserError(f"weight_decay = {weight_decay} must be a finite number of at least 0")
    if lr is None and table_lr is not None:
        raise UserError(
            f"table_lr = {table_lr} is a multiple of lr, which is missing: pass lr= too"
        )
    factor = 1.0 if lr is None else TABLE_LR if table_lr is None else table_lr
    rate = 1.0 if lr is None else lr
    _check_rates(lr=rate, table_lr=factor)

    tables, exempt = set(table_names(model)), exempt_parameters(model)

    def settings(name: str, parameter: nn.Parameter) -> tuple[float, float]:
        decay = 0.0 if id(parameter) in exempt else weight_decay
        return rate * factor if name in tables else rate, decay

    if lr is None and any(model.get_parameter(name).requires_grad for name in tables):
        warnings.warn(
            f"parameter_groups without lr=: {len(tables)} tables learn at the optimizer's own "
            "rate, and in a short training hardly move; pass lr=, and they learn at "
            f"{TABLE_LR:g} times that (table_lr=)",
            stacklevel=2,
        )
    groups = group_parameters(model, settings)
    groups.sort(key=lambda group: (group["lr"] != rate, -group["weight_decay"]))
    for group in groups:
        if group["lr"] != rate:
            group[_TABLE_LR] = factor
    return [_without_rate(group) for group in groups] if lr is None else groups


def scale_table_rates(
    optimizer: torch.optim.Optimizer, model: nn.Module, table_lr: float = TABLE_LR
) -> None:
    """Gives the tables in an optimizer of timm their rate, through `lr_scale`.

    `timm.optim.create_optimizer_v2` trains tables at the rate of the layer that they are in. Here
    they get groups of their own, with the settings of those that they leave and `lr_scale` times
    `table_lr`. timm's schedulers alone read `lr_scale`; with those of torch use
    `parameter_groups`. Call it once, before a scheduler is made.

    Args:
        optimizer: What `create_optimizer_v2(model, ...)` returned, with layer decay or without.
        model: The model, equipped or plain.
        table_lr: The learning rate of the tables, as a multiple of that of the layer.

    Examples:
        >>> import irpe, timm, timm.optim
        >>> model = irpe.equip(timm.create_model("vit_tiny_patch16_224", depth=1), "product-bias-k")
        >>> optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-4, weight_decay=0.05)
        >>> irpe.scale_table_rates(optimizer, model)
        >>> [group.get("lr_scale", 1.0) for group in optimizer.param_groups]
        [1.0, 1.0, 5.0]
    """
    _check_numbers(table_lr=table_lr)
    _check_rates(table_lr=table_lr)
    named = {name: model.get_parameter(name) for name in table_names(model)}
    tables = {id(table): name for name, table in named.items() if table.requires_grad}
    _check_optimizer(optimizer, tables)
    for group in list(optimizer.param_groups):
        is_table = [id(p) in tables for p in group["params"]]
        if not any(is_table):
            continue
        rate = {"lr_scale": group.get("lr_scale", 1.0) * table_lr, _TABLE_LR: table_lr}
        own = {**group, **_choose(group, is_table), **rate}
        if all(is_table):
            group.update(own)
        else:
            group.update(_choose(group, [not each for each in is_table]))
            optimizer.add_param_group(own)


def _choose(group: dict[str, Any], is_chosen: list[bool]) -> dict[str, Any]:
    """Returns the lists of a group, of parameters and of their names if it has any, with some."""
    names = [name for name in ("params", "param_names") if name in group]
    return {name: list(compress(group[name], is_chosen)) for name in names}


def _check_optimizer(optimizer: torch.optim.Optimizer, tables: dict[int, str]) -> None:
    """Raises an error if tables are not in an optimizer, or if it is too late for their rate."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    missing = [name for key, name in tables.items() if key not in groups]
    if missing:
        raise UserError(
            f"the optimizer does not have {len(missing)} of {len(tables)} tables of the model, the "
            f"first is {missing[0]}: make the optimizer after irpe.equip, of the same model"
        )
    for group in (groups[key] for key in tables):
        if _TABLE_LR in group:
            raise UserError(
                f"the tables have {group[_TABLE_LR]} times the rate of the model already, from "
                "irpe.scale_table_rates or irpe.parameter_groups(lr=...): call one of them, once"
            )
        if "initial_lr" in group:
            raise UserError(
                "a scheduler of this optimizer was made already and would not read the rate of the "
                "tables: call irpe.scale_table_rates first, then make the scheduler"
            )


def _check_numbers(**values: object) -> None:
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Real):
            raise UserTypeError(f"{name} = {value!r} is not a number: pass a float or an int")


def _check_rates(**rates: float) -> None:
    for name, value in rates.items():
        if not (value > 0 and math.isfinite(value)):
            raise UserError(f"{name} = {value} must be a finite number greater than 0")


def exempt_parameters(model: nn.Module) -> set[int]:
    """Returns the parameters without weight decay, by identity: tables, biases, norms, the own.

    Every module in a model is asked by its own `no_weight_decay`, whose names are those within it:
    wrappers such as DDP, torch.compile and LightningModule put a prefix before them.
    """
    tables = set(table_names(model))
    named = list(model.named_parameters())
    exempt = {id(p) for name, p in named if p.ndim <= 1 or name in tables}
    for module in model.modules():
        own: Any = getattr(module, "no_weight_decay", None)
        if callable(own):
            names = set(cast(Iterable[str], own()))
            within = module.named_parameters(remove_duplicate=False)
            exempt |= {id(p) for name, p in within if name in names}
    return exempt


def group_parameters(
    model: nn.Module, settings: Callable[[str, nn.Parameter], tuple[float, float]]
) -> list[dict[str, Any]]:
    """Returns a group for each learning rate and weight decay, of what requires a gradient."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[settings(name, parameter)].append(parameter)
    return [
        {"params": chosen, "lr": lr, "weight_decay": decay}
        for (lr, decay), chosen in groups.items()
    ]


def _without_rate(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "lr"}
