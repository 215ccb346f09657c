"""The effect of encodings: how much the output of a model's attention changes without them."""

import copy
from collections import defaultdict
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from irpe.adapters.equipped import (
    active_encoding,
    attentions_if_any,
    equipped_blocks,
    generator_of,
    is_equipped,
)
from irpe.nn.modes import eval_mode
from irpe.nn.tables import RelativePositionEncoding, Temperature
from irpe.ops.shapes import Tokens

NEXT_TO_NOTHING = 0.02  # an effect below which an encoding cannot explain a result
FAR = 1.0  # the largest element of tables that do something; those solved for have 3 to 70


def measure_effect(model: nn.Module, *inputs: Any, **keywords: Any) -> dict[str, float]:
    """Returns the effect of each encoding of a model on some images, by the attention's name.

    It is the norm of the change of an attention's output when all its tables are zero, relative to
    the norm of that output: 0 for tables that are zero, and about 1 where the encoding decides what
    is attended to. Queries, keys and values stay the same. An encoding that acts from the start is
    compared with attention without it. For a position generator (cpvt) it is the norm of what it
    adds, relative to the tokens.

    Args:
        model: An equipped model; its training mode is as before afterwards.
        inputs: What it is called with.
        keywords: What it is called with by name.
    """
    return effects_in(model, lambda: model(*inputs, **keywords))


def effects_in(model: nn.Module, run: Callable[[], object]) -> dict[str, float]:
    """Returns the effect of each encoding in a function that calls the model, by attention."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    with torch.no_grad(), eval_mode(model), _comparing(model, sums):
        run()
    return {name: (change / whole) ** 0.5 for name, (change, whole) in sums.items() if whole}


def mean_effect(effects: dict[str, float]) -> float | None:
    """Returns the mean over the attentions; `None` where there are none."""
    return sum(effects.values()) / len(effects) if effects else None


def warn_of_effect(effect: float, has_tables: bool) -> list[str]:
    """Returns what to say of an effect that is next to nothing, and nothing of a larger one."""
    if effect >= NEXT_TO_NOTHING:
        return []
    rate = ", or raise the learning rate of its tables (table_lr, --table-lr)" if has_tables else ""
    return [
        "warning: the encoding is next to nothing (without it the attention's output changes by "
        f"{effect:.2%}): results say nothing about it; train longer{rate}"
    ]


def warn_of_reach(model: nn.Module, rate: float, steps: int) -> list[str]:
    """Returns what to say of tables that cannot get far from zero, and nothing of others.

    Adam moves an element by at most the learning rate in a step.
    """
    elements = [
        float(table.detach().abs().max())
        for module in model.modules()
        if is_equipped(module)
        for table in active_encoding(module).parameters()
    ]
    reach = rate * steps
    if not elements or max(elements) + reach >= FAR:
        return []
    return [
        f"warning: in the {steps} steps that are left an element of a table cannot get further "
        f"than {reach:.2g} from where it is, next to zero: positions of trained models need 1 and "
        "more. Raise the learning rate of the tables (table_lr, --table-lr), train longer, or "
        "start from what irpe make-relative writes"
    ]


@contextmanager
def _comparing(model: nn.Module, sums: dict[str, list[float]]) -> Generator[None]:
    """Adds up the squared norms of changes and outputs, as long as the context lasts."""
    modules: dict[str, nn.Module] = {
        name: active_encoding(attention) for name, attention in attentions_if_any(model).items()
    }
    modules |= {name: generator_of(block) for name, block in equipped_blocks(model).items()}
    handles: list[Any] = []
    for name, module in modules.items():
        handles.append(
            module.register_forward_hook(
                partial(_compare, without=_without(module), sums=sums[name]), with_kwargs=True
            )
        )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compare(
    _: nn.Module,
    args: Any,
    kwargs: Any,
    output: Tensor,
    *,
    without: Callable[..., Tensor],
    sums: list[float],
) -> None:
    """Adds the squared norms of a change and of an output to two sums."""
    change = output.float() - without(*args, **kwargs).float()
    sums[0] += float(change.square().sum())
    sums[1] += float(output.float().square().sum())


def _without(module: nn.Module) -> Callable[..., Tensor]:
    """Returns what computes the output of a module without its encoding."""
    if isinstance(module, RelativePositionEncoding) and not module.spec.keeps_output:
        return _plain_attention
    zero: Any = copy.deepcopy(module)
    zero.reset_parameters()
    return zero


def _plain_attention(
    q: Tokens,
    k: Tokens,
    v: Tokens,
    *,
    grid: object,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    temperature: Temperature | None = None,
    **_: object,
) -> Tokens:
    """Returns attention without an encoding; arguments as in `RelativePositionEncoding`."""
    if temperature is not None:
        q, scale = q * temperature, 1.0
    return F.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale)
