"""What the training loop asks of what is learned."""

from typing import Any, Protocol

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from irpe.train.config import RunConfig
from irpe.train.sampling import Drawn


class Task(Protocol):
    """What is learned: the data, the model, the loss and the score."""

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        ...

    @property
    def images(self) -> Drawn:
        """The images to train on."""
        ...

    def check_batch(self, size: int) -> None:
        """Raises an error if that many images at a time on a device will not do."""
        ...

    def build(self) -> nn.Module:
        """Returns the model at its start."""
        ...

    def groups(self, model: nn.Module) -> Any:
        """Returns what the optimizer learns, as timm takes it: a model, or groups of parameters."""
        ...

    def begin_step(self, batches: list[Any], accelerator: Accelerator) -> None:
        """Is told the batches of a process before a step."""
        ...

    def loss(self, model: nn.Module, batch: Any, device: torch.device) -> Tensor:
        """Returns the loss of a batch; the mean over batches and processes is the step's."""
        ...

    def broken(self, batch: Any) -> list[int]:
        """Returns the numbers of a batch's images that could not be read."""
        ...

    def check_broken(self, broken: set[int]) -> None:
        """Raises an error if too many images could not be read so far."""
        ...

    def files(self, batch: Any) -> list[str]:
        """Returns where a batch's images come from."""
        ...

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Returns the numbers of a row of the run's table."""
        ...
