"""What a model has and does: its parameters and its multiply-accumulates."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode


def count_parameters(model: nn.Module) -> int:
    """Returns the number of learned parameters of a model."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def count_macs(model: nn.Module, *inputs: Tensor) -> int:
    """Returns the multiply-accumulates of one forward pass in eval mode, counted on the operations.

    Args:
        model: The model; its training mode is as before afterwards.
        inputs: What it is called with.
    """
    was_training = model.training
    counter: Any = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), counter:
            model.eval()(*inputs)
    finally:
        model.train(was_training)
    return counter.get_total_flops() // 2  # a multiply-accumulate is two operations
