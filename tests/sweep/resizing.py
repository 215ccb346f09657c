"""Whether a model can be resized, there and back."""

import torch
from torch import nn

import irpe

MORE = 64  # pixels, by which images grow


def try_resize(model: nn.Module, size: tuple[int, int]) -> str:
    """Returns the size that an equipped model was resized to and back from, or why it cannot be.

    Args:
        model: The model.
        size: The rows and columns that it is for.
    """
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    reasons: list[str] = []
    for columns in (size[1], size[1] + MORE):  # not a square first
        other = (size[0] + MORE, columns)
        try:
            irpe.resize(model, other)
        except irpe.UserError as error:
            reasons.append(str(error).partition(" pixels: ")[2] or str(error))
            continue
        irpe.resize(model, size)
        after = model.state_dict()
        if list(after) != list(before):
            raise AssertionError(f"{type(model).__name__} has other tensors after going back")
        for name, tensor in after.items():
            if not torch.equal(tensor, before[name]):
                raise AssertionError(f"{name} of {type(model).__name__} differs after going back")
        return f"{other[0]} x {other[1]}"
    return f"not: {reasons[0]}"
