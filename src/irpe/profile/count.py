"""What a model has and does: its parameters and its multiply-accumulates."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def count_parameters(model: nn.Module) -> int:
    """Returns the number of learned parameters of a model.

    Examples:
        >>> import irpe.profile, timm
        >>> irpe.profile.count_parameters(timm.create_model("vit_tiny_patch16_224"))
        5717416
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def count_macs(model: nn.Module, *inputs: Tensor) -> int:
    """Returns the multiply-accumulates of one forward pass in eval mode, counted on the operations.

    Args:
        model: The model; its training mode is as before afterwards.
        inputs: What it is called with.

    Examples:
        >>> import irpe.profile, timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> macs = irpe.profile.count_macs(model, torch.randn(1, 3, 224, 224))
    """
    return count_macs_in(model, lambda: model(*inputs))


def count_macs_in(model: nn.Module, run: Callable[[], object]) -> int:
    """Returns the multiply-accumulates of a function that calls a model, which is in eval mode.

    Args:
        model: The model; its training mode is as before afterwards.
        run: Calls it.
    """
    was_training = model.training
    learned = [p for p in model.parameters() if p.requires_grad]
    counter: Any = FlopCounterMode(display=False)
    try:
        for parameter in learned:  # the counter fails where a module is given one that learns
            parameter.requires_grad_(False)
        with torch.no_grad(), counter:
            model.eval()
            run()
    finally:
        model.train(was_training)
        for parameter in learned:
            parameter.requires_grad_(True)
    return counter.get_total_flops() // 2  # a multiply-accumulate is two operations
