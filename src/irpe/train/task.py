"""What the training loop asks of a task, and the tasks there are: one folder each.

A folder has `config` (a subclass of `RunConfig`), `task` (with `open_task`) and `model` (with
`build_for`); `configs` lists the configurations.
"""

import importlib
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from irpe.errors import UserError
from irpe.files import check_json
from irpe.progress import Progress
from irpe.train.config import RUN_FILE, RunConfig
from irpe.train.configs import CONFIGS, Config
from irpe.train.weights import Weights

if TYPE_CHECKING:
    from accelerate import Accelerator

    from irpe.train.sampling import SampledDataset


_FOLDERS = {"classification": "classify", "detection": "detect", "segmentation": "segment"}


class TaskScore(Protocol):
    """What an evaluation found."""

    def row(self) -> dict[str, float]:
        """Returns the columns of the run's table."""
        ...


class Task(Protocol):
    """What is learned: the data, the model, the loss and the score."""

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""
        ...

    @property
    def model_name(self) -> str:
        """What to call the model."""
        ...

    @property
    def images(self) -> "SampledDataset":
        """The images to train on."""
        ...

    @property
    def val_images(self) -> "SampledDataset":
        """The images to evaluate on."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """What the user should know about the data."""
        ...

    def check_micro_batch(self, size: int) -> None:
        """Raises an error if a forward pass cannot have that many images on a device."""
        ...

    def build(self) -> nn.Module:
        """Returns the model at its start."""
        ...

    def training_module(self, model: nn.Module) -> nn.Module:
        """Returns the module that `loss` calls: the model, or a view of it on the same weights."""
        ...

    def optimizer_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameters in groups, each with a learning rate and a weight decay."""
        ...

    def normalizer(self, batches: list[Any], accelerator: "Accelerator") -> Any:
        """Returns what the losses of a step are divided by, the same in all processes.

        Args:
            batches: The micro-batches of this process.
            accelerator: Knows the other processes.
        """
        ...

    def loss(self, module: nn.Module, batch: Any, normalizer: Any, device: torch.device) -> Tensor:
        """Returns the loss of a micro-batch; a step's loss is the mean over all of them.

        Args:
            module: What `training_module` returned, wrapped for several processes.
            batch: The micro-batch.
            normalizer: What `normalizer` returned for the step.
            device: Where it is computed.
        """
        ...

    def broken(self, batch: Any) -> list[int]:
        """Returns the indices of a batch's images that could not be read."""
        ...

    def check_broken(self, broken: set[int]) -> None:
        """Raises an error if too many images could not be read so far."""
        ...

    def files(self, batch: Any) -> list[str]:
        """Returns where a batch's images come from."""
        ...

    def evaluate(self, model: nn.Module, accelerator: "Accelerator") -> TaskScore:
        """Returns the score of a model on the validation images."""
        ...

    def model_inputs(self, batch: Any, device: torch.device) -> dict[str, Tensor]:
        """Returns what a model is called with, by name, for a batch of validation images."""
        ...


def open_task(config: RunConfig, progress: Progress, weights: Weights | None) -> Task:
    """Returns the task of a configuration, with the data that it names.

    Args:
        config: The configuration.
        progress: Is told how the preparation of the data goes.
        weights: Those of the checkpoint that the run resumes from, if there is one.
    """
    module: Any = importlib.import_module(f"irpe.tasks.{_FOLDERS[config.task]}.task")
    return module.open_task(config, progress, weights)


def build_for(config: RunConfig, weights: Weights) -> nn.Module:
    """Returns the model of a run that has these weights, not yet filled with them."""
    module: Any = importlib.import_module(f"irpe.tasks.{_FOLDERS[config.task]}.model")
    return module.build_for(config, weights)


def parse_config(text: str, path: Path = Path(RUN_FILE)) -> Config:
    """Returns the configuration that `RunConfig.to_json` wrote.

    Args:
        text: What it wrote.
        path: Where it was read.
    """
    try:
        written: dict[str, Any] = json.loads(text)
        content = {name: value for name, value in written.items() if name != "sha256"}
        config = CONFIGS[content.pop("task")]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"not the configuration of a run: {error!r}") from error
    known = {field.name for field in fields(config)}
    unknown, missing = sorted(set(content) - known), sorted(known - set(content))
    if unknown or missing:
        raise UserError(
            f"the configuration of another release (unknown fields: {', '.join(unknown) or 'none'};"
            f" missing: {', '.join(missing) or 'none'}): read it with that release, or train again"
        )
    parsed = config(**content)
    check_json(written, path)
    return parsed
