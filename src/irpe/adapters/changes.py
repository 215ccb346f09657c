"""Changes to a model that can be undone: all of them are made, or none."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from irpe.adapters.grids import SOURCE, GridSource
from irpe.core.sinusoid import sinusoid
from irpe.errors import UserError
from irpe.nn.encoding import RelativePositionEncoding

Undo = Callable[[], object]
Change = Callable[[], Undo]  # makes a change and returns what undoes it


def apply_changes(changes: Iterable[Change]) -> ExitStack:
    """Makes the changes in order; undoes those already made if one fails.

    Returns:
        What undoes them all when it is closed.
    """
    # Parameters made in inference mode could never be trained.
    with torch.inference_mode(False), ExitStack() as undo:
        for change in changes:
            undo.callback(change())
        return undo.pop_all()


def equip_attention(
    attention: nn.Module,
    equipped_class: type[nn.Module],
    encoding: RelativePositionEncoding,
    grid: GridSource,
) -> Undo:
    """Gives an attention an encoding and the class whose forward uses it.

    It remains the same object with the same parameters, so names in checkpoints stay valid.
    """
    plain_class = type(attention)
    attention.rpe = encoding
    vars(attention)[SOURCE] = grid
    attention.__class__ = equipped_class

    def undo() -> None:
        attention.__class__ = plain_class
        del attention.rpe, vars(attention)[SOURCE]

    return undo


def set_attribute(owner: Any, name: str, value: object) -> Undo:
    """Sets an attribute in the dictionary of an object, past any `__setattr__` of its class."""
    before = dict(vars(owner))
    vars(owner)[name] = value

    def undo() -> None:
        del vars(owner)[name]
        if name in before:
            vars(owner)[name] = before[name]

    return undo


def drop_parameter(module: nn.Module, name: str) -> Undo:
    """Removes a parameter from a module, which then has `None` in its place."""
    learned = module._parameters[name]
    module._parameters[name] = None
    return partial(module._parameters.__setitem__, name, learned)


def drop_module(module: nn.Module, name: str) -> Undo:
    """Removes a submodule from a module, which then has `None` in its place."""
    return replace_module(module, name, None)


def replace_module(module: nn.Module, name: str, other: nn.Module | None) -> Undo:
    """Puts another submodule, or `None`, in the place of one."""
    learned = module._modules[name]
    module._modules[name] = other
    return partial(module._modules.__setitem__, name, learned)


def put_absolute(module: nn.Module, name: str, grid: Sequence[int], absolute: str) -> Undo:
    """Replaces an absolute encoding, of tokens or of a map, by zeros or sinusoids.

    Args:
        module: Its owner.
        name: Its name there; the grid is its last tokens, or all of a map.
        grid: The shape of the grid.
        absolute: "none" or "sinusoid".
    """
    before: Tensor | None = getattr(module, name, None)  # a parameter, or what replaced it
    if before is None:
        raise UserError(
            f"absolute {absolute!r}: the model has no absolute encoding to replace; use 'keep'"
        )
    values = torch.zeros_like(before.detach())
    if absolute == "sinusoid":
        patches = sinusoid(grid, values.shape[-1])
        tokens = values.view(-1, values.shape[-1])
        tokens[-len(patches) :] = patches.to(values)
    return replace_by_buffer(module, name, values)


def replace_by_buffer(module: nn.Module, name: str, values: Tensor) -> Undo:
    """Replaces a learned tensor of a module by fixed values, which are not saved with the model."""
    kinds: list[dict[str, Any]] = [module._parameters, module._buffers]
    before = [dict(kind) for kind in kinds]  # in their order, which optimizers go by
    was_saved = name not in module._non_persistent_buffers_set
    for kind in kinds:
        kind.pop(name, None)
    module.register_buffer(name, values, persistent=False)

    def undo() -> None:
        if was_saved:
            module._non_persistent_buffers_set.discard(name)
        for kind, items in zip(kinds, before, strict=True):
            kind.clear()
            kind.update(items)

    return undo
