"""Changes to a model as exchanges of slots: doing one again undoes it.

A change is a list of swaps. It holds what is not in the model now, so that it is copied and pickled
with the model, and a copy can be changed back as the model itself can.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from irpe.core.sinusoid import sinusoid
from irpe.errors import UserError


class Absent:
    """Stands in the place of a value where a slot is empty."""


@dataclass(eq=False)
class Swap:
    """A slot of an object, and what is to be in it.

    Args:
        owner: The object, a module or a configuration.
        kind: The dictionary or set that has the slot: "__dict__", or an attribute of the object
            such as "_parameters"; or "__class__", which is a slot by itself.
        key: The key in the dictionary.
        value: What goes in, and after the exchange what was there; `Absent` for an empty slot.
        is_first: Whether a new key goes before all others.
    """

    owner: Any
    kind: str
    key: Any
    value: Any
    is_first: bool = False
    _later: tuple[Any, ...] = ()  # the keys behind one that was removed

    def exchange(self) -> None:
        """Exchanges what is in the slot and what is not."""
        if self.kind == "__class__":
            self.owner.__class__, self.value = self.value, type(self.owner)
            return
        slots = vars(self.owner) if self.kind == "__dict__" else vars(self.owner)[self.kind]
        if isinstance(slots, set):
            before = True if self.key in slots else Absent
            (slots.discard if self.value is Absent else slots.add)(self.key)
        elif self.value is Absent:
            keys = list(slots)
            before = slots.pop(self.key, Absent)
            self._later = tuple(keys[keys.index(self.key) + 1 :]) if before is not Absent else ()
        else:  # an item comes back in its order, which optimizers go by
            before, keys = slots.get(self.key, Absent), list(slots)
            slots[self.key] = self.value
            for key in (keys if self.is_first else self._later) if before is Absent else ():
                if key in slots:
                    slots[key] = slots.pop(key)
        self.value = before


Change = Sequence[Swap]


def apply_change(change: Change) -> None:
    """Makes a change; nothing in it can fail."""
    for swap in change:
        swap.exchange()


def undo_change(change: Change) -> None:
    """Changes back, after which the change can be made again."""
    for swap in reversed(change):
        swap.exchange()


def set_attribute(owner: Any, name: str, value: object) -> list[Swap]:
    """Sets an attribute in the dictionary of an object, past any `__setattr__` of its class."""
    return [Swap(owner, "__dict__", name, value)]


def set_class(module: nn.Module, kind: type[nn.Module]) -> list[Swap]:
    """Gives a module another class; it remains the same object with the same parameters.

    Raises an error if it has a forward beside that of its class, which would be called instead.
    """
    if "forward" in vars(module):
        raise UserError(
            f"a {type(module).__qualname__} has a forward set on the instance, as hooks of "
            "Accelerate set it, so that the encoding would do nothing: equip the model first and "
            "add hooks afterwards (accelerate.hooks.remove_hook_from_module(model, recurse=True) "
            "removes them)"
        )
    return [Swap(module, "__class__", None, kind)]


def put_module(module: nn.Module, name: str, other: nn.Module | None) -> list[Swap]:
    """Puts a submodule, or `None`, in the place of one."""
    return [Swap(module, "_modules", name, other)]


def add_hook(
    module: nn.Module,
    hook: object,
    *,
    before: bool = False,
    with_kwargs: bool = False,
    always_call: bool = False,
) -> list[Swap]:
    """Registers a hook on the forward of a module.

    Args:
        module: The module.
        hook: A callable that can be copied and pickled.
        before: Whether it is called before the forward, and then before all other hooks there.
        with_kwargs: Whether it takes keywords.
        always_call: Whether it is called after a forward that failed, too.
    """
    kind, key = (
        "_forward_pre_hooks" if before else "_forward_hooks",
        RemovableHandle(OrderedDict[int, Any]()).id,
    )
    swaps = [Swap(module, kind, key, hook, is_first=before)]
    if with_kwargs:
        swaps.append(Swap(module, f"{kind}_with_kwargs", key, True))
    if always_call:
        swaps.append(Swap(module, "_forward_hooks_always_called", key, True))
    return swaps


def put_zeros(module: nn.Module, names: Iterable[str]) -> list[Swap]:
    """Replaces learned tensors by zeros, so that the forward of their module stays whole."""
    tensors: Any = {name: getattr(module, name) for name in names}
    return [
        swap
        for name, tensor in tensors.items()
        for swap in put_buffer(module, name, torch.zeros_like(tensor.detach()))
    ]


def put_absolute(module: nn.Module, name: str, grid: Sequence[int], absolute: str) -> list[Swap]:
    """Replaces an absolute encoding, the last tokens or all of a map, by zeros or sinusoids."""
    before: torch.Tensor | None = getattr(module, name, None)  # a parameter, or what replaced it
    if before is None:
        raise UserError(
            f"absolute {absolute!r}: the model has no absolute encoding to replace; use 'keep'"
        )
    values = torch.zeros_like(before.detach())
    if absolute == "sinusoid":
        patches = sinusoid(grid, values.shape[-1])
        tokens = values.view(-1, values.shape[-1])
        tokens[-len(patches) :] = patches.to(values)
    return put_buffer(module, name, values)


def put_buffer(module: nn.Module, name: str, values: torch.Tensor) -> list[Swap]:
    """Replaces a tensor of a module by fixed values, which are not saved with the model."""
    learned = [Swap(module, "_parameters", name, Absent)] if name in module._parameters else []
    fixed = Swap(module, "_buffers", name, values)
    return [*learned, fixed, Swap(module, "_non_persistent_buffers_set", name, True)]


class Snapshot:
    """What is in the slots of a model and its configurations, to go back to or compare with."""

    def __init__(self, model: nn.Module, changes: Iterable[Change] = ()) -> None:
        self._states = [
            (
                owner,
                type(owner),
                dict(vars(owner)),
                {name: copy(slots) for name, slots in vars(owner).items() if _has_slots(slots)},
            )
            for owner in (*owners_of(model), *(swap for change in changes for swap in change))
        ]

    def restore(self) -> None:
        """Puts everything back."""
        for owner, kind, values, inner in self._states:
            owner.__class__ = kind
            vars(owner).clear()
            vars(owner).update(values)
            for name, slots in inner.items():
                values[name].clear()
                values[name].update(slots)

    def change(self) -> list[Swap]:
        """Returns what has changed since in attributes and tensors; it has been made already."""
        swaps: list[Swap] = []
        for owner, _, values, inner in self._states:
            now = vars(owner)
            for name in dict.fromkeys((*values, *now)):
                before = values.get(name, Absent)
                if before is not now.get(name, Absent):
                    swaps.append(Swap(owner, "__dict__", name, before))
            for kind in _TENSOR_SLOTS & inner.keys():
                slots: Any = inner[kind]
                for name in dict.fromkeys((*slots, *now[kind])):
                    if isinstance(slots, set):
                        before = True if name in slots else Absent
                        is_same = (name in slots) == (name in now[kind])
                    else:
                        before = slots.get(name, Absent)
                        is_same = before is now[kind].get(name, Absent)
                    if not is_same:
                        swaps.append(Swap(owner, kind, name, before))
        return swaps


_TENSOR_SLOTS = {"_parameters", "_buffers", "_non_persistent_buffers_set"}


def owners_of(model: nn.Module) -> list[Any]:
    """Returns the modules of a model, and the configurations of transformers that they have."""
    found: dict[int, Any] = {id(module): module for module in model.modules()}
    waiting = list(found.values())
    while waiting:
        for value in vars(waiting.pop()).values():
            is_config = type(value).__name__.endswith("Config") and hasattr(value, "__dict__")
            if is_config and id(value) not in found:
                found[id(value)] = value
                waiting.append(value)
    return list(found.values())


def _has_slots(value: object) -> bool:
    return isinstance(value, dict | set)
