"""The mode of a model while something is measured on it."""

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


@contextmanager
def eval_mode(model: nn.Module) -> Generator[None]:
    """Sets a model to eval mode, and each module back to its own afterwards."""
    was_training = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in was_training:
            module.training = mode
