"""Optimizer and learning rate schedule of a run, both built by timm, and groups of parameters."""

from typing import Any

from timm.optim._optim_factory import create_optimizer_v2
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.scheduler_factory import create_scheduler_v2
from torch import nn

from irpe.adapters.equipped import table_names
from irpe.adapters.parameter_groups import exempt_parameters, group_parameters
from irpe.core.encodings import AnyEncoding, parse_encoding
from irpe.core.encodings.alibi import Alibi2D
from irpe.core.encodings.joined import Joined
from irpe.core.encodings.model_only import NoEncoding
from irpe.core.encodings.rope import RopeAxial
from irpe.errors import UserError
from irpe.train.config import RunConfig

_ABSOLUTE = ("pos_embed", "position_embeddings")  # learned, of timm and of transformers


def build_optimizer(groups: list[dict[str, Any]], config: RunConfig) -> Any:
    """Returns the optimizer; its first group has the learning rate of the configuration."""
    groups = sorted(groups, key=lambda group: group["lr"] != config.lr)
    rates = [group["lr"] for group in groups]
    fused: dict[str, Any] = {"fused": True} if config.optimizer == "adamw" else {}
    try:
        optimizer = create_optimizer_v2(
            groups, opt=config.optimizer, lr=config.lr, weight_decay=config.weight_decay, **fused
        )
    except (AssertionError, ImportError, TypeError, ValueError) as error:
        raise UserError(
            f"optimizer {config.optimizer!r} cannot be made by timm, which has adamw, sgd, lamb "
            f"and more: {error}"
        ) from error
    if [group.get("lr") for group in optimizer.param_groups] != rates:
        raise UserError(
            f"optimizer {config.optimizer!r} does not take a learning rate for each group of "
            "parameters, which tables need: choose adamw, sgd, lamb or another that does"
        )
    return optimizer


def build_schedule(optimizer: Any, config: RunConfig, steps: int) -> Any:
    """Returns the schedule, cosine, polynomial or step, which is updated at every step."""
    if config.low_lr_epochs:
        drop = (config.epochs - config.low_lr_epochs) * steps
        return MultiStepLRScheduler(
            optimizer,
            decay_t=[drop + 1],  # it counts from 1
            decay_rate=0.1,
            warmup_t=config.warmup_epochs * steps,
            warmup_lr_init=config.warmup_lr,
            t_in_epochs=False,
        )
    power = config.decay_power
    schedule, _ = create_scheduler_v2(
        optimizer,
        sched="poly" if power else "cosine",
        decay_rate=power or 1.0,  # which is the power of timm's polynomial
        num_epochs=config.epochs,
        min_lr=config.min_lr,
        warmup_lr=config.warmup_lr,
        warmup_epochs=config.warmup_epochs,
        step_on_epochs=False,
        updates_per_epoch=steps,
    )
    return schedule


def encoder_groups(model: nn.Module, config: RunConfig, absolute_lr: float) -> list[dict[str, Any]]:
    """Returns groups for an optimizer; tables and the absolute encoding have rates of their own."""
    own = rate_fields(model)
    factors = {"table_lr": config.table_lr, "absolute_lr": absolute_lr}
    exempt = exempt_parameters(model)

    def settings(name: str, parameter: nn.Parameter) -> tuple[float, float]:
        factor = factors[own[name]] if name in own else 1.0
        return config.lr * factor, 0.0 if id(parameter) in exempt else config.weight_decay

    return group_parameters(model, settings)


def rate_fields(model: nn.Module) -> dict[str, str]:
    """Returns the field of a configuration that sets a parameter's rate, where it has its own.

    Args:
        model: The model.

    Returns:
        "table_lr" or "absolute_lr", by the name of the parameter.
    """
    tables = set(table_names(model))
    learned = [name for name, each in model.named_parameters() if each.requires_grad]
    absolute = [name for name in learned if name.split(".")[-1] in _ABSOLUTE]
    return {
        **{name: "table_lr" for name in learned if name in tables},
        **dict.fromkeys(absolute, "absolute_lr"),
    }


def learns_tables(encoding: AnyEncoding | str) -> bool:
    """Returns whether an encoding has parameters that `table_lr` is the rate of."""
    match parse_encoding(encoding):
        case NoEncoding() | RopeAxial() | Alibi2D():
            return False
        case Joined() as both:
            return learns_tables(both.rotation) or learns_tables(both.tables)
        case _:
            return True
