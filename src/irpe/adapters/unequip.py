"""Taking encodings out of a model again."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from irpe.adapters.equipped import Equipment, equipment_of, table_names
from irpe.errors import UserError

_UNDO = "_irpe_undo"  # the attribute of a model that holds how to undo each call of `equip`


class UndoStack:
    """What undoes the calls of `equip` on one model, the last one first.

    It belongs to this very model: a copy of the model, or one that was unpickled, has an empty one.
    """

    def __init__(self) -> None:
        self.undo = ExitStack()
        self.num_calls = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> "UndoStack":
        return UndoStack()

    def __reduce__(self) -> tuple[type["UndoStack"], tuple[()]]:
        return UndoStack, ()


def remember_undo(model: nn.Module, undo: ExitStack, num_calls: int = 1) -> None:
    """Keeps what undoes a call of `equip`, or several."""
    stack: UndoStack = vars(model).setdefault(_UNDO, UndoStack())
    stack.undo.push(undo)
    stack.num_calls += num_calls


def unequip(model: nn.Module) -> dict[str, Tensor]:
    """Makes an equipped model what it was before `equip`, and returns its tables by name.

    All calls of `equip` are undone. What they removed (an absolute encoding, a built-in bias) is
    put back with the values that it had; everything else that was trained since stays.

    Args:
        model: A model that `equip` returned. A copy of one, or one that was loaded after something
            had been removed from it, cannot be what it was: an error says so.

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
    stack: UndoStack = vars(model).get(_UNDO, UndoStack())
    if stack.num_calls != len(calls):
        missing = " and ".join(removed_by(calls)) or "the plain attention"
        raise UserError(
            f"this {type(model).__qualname__} is a copy of an equipped model, or was loaded: it "
            f"does not have {missing} of the first one any more; unequip the model that was "
            "equipped, before it is copied or saved"
        )
    tables = {name: model.get_parameter(name).detach() for name in table_names(model)}
    like, before = next(model.parameters()), set(model.state_dict())
    stack.undo.close()
    del vars(model)[_UNDO]
    _move_what_came_back(model, before, like)
    return tables


def removed_by(calls: Sequence[Equipment]) -> list[str]:
    """Returns what equipping took out of the model, in words."""
    removed: list[str] = []
    if any(call.absolute != "keep" or str(call.spec) == "cpvt" for call in calls):
        removed.append("the absolute encoding")
    if any(call.builtin_bias != "keep" for call in calls):
        removed.append("the relative encoding of its own")
    return removed


def _move_what_came_back(model: nn.Module, before: set[str], like: Tensor) -> None:
    """Gives tensors that were put back the device and dtype that the model has got meanwhile."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name not in before and tensor.is_floating_point():
                tensor.data = tensor.data.to(like.device, like.dtype)
