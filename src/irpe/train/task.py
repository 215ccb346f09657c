"""What a task is: the contract of the training loop and of evaluation with what is learned.

A task is a class with four facts and seven methods. Everything above it (training, evaluation,
ablation, pictures, progress) is written once and knows no task:
`irpe.train.register_task` adds one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from irpe.errors import UserError
from irpe.progress import Listener
from irpe.train.config import RunConfig
from irpe.train.score import Measure, Score
from irpe.train.weights import Weights

if TYPE_CHECKING:
    from accelerate import Accelerator

    from irpe.train.sampling import Sample

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Condition:
    """How images that a model is evaluated on differ from those of its run.

    Args:
        size: The rows and columns of the input, in pixels; `None`: those of the run.
        shift: By how many patches images are shifted: right, down, left and up in turn. Grey ones
            leave black, those with colours their reflection.
        scale: How much larger images are.
        windows: Whether sliding windows are averaged; `None`: as the run does it.

    Examples:
        >>> import irpe.train
        >>> irpe.train.Condition(size=(48, 64)).size
        (48, 64)
    """

    size: tuple[int, int] | None = None
    shift: int = 0
    scale: float = 1.0
    windows: bool | None = None

    def check(self, task: "Task | type[Task]") -> None:
        """Raises an error for a condition that a task does not have."""
        for each in fields(self):
            value = getattr(self, each.name)
            if value != each.default and each.name not in task.takes:
                takes = ", ".join(task.takes) or "none"
                raise UserError(
                    f"{each.name} = {value} is not a condition of {task.Config.task}, which has "
                    f"{takes}: leave it out"
                )


AS_TRAINED = Condition()


class Source(Protocol):
    """Images that come from somewhere."""

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes, in the order of the labels; empty where there are none."""
        ...

    def __len__(self) -> int: ...

    def filename(self, index: int) -> str:
        """Returns where an image comes from."""
        ...


class Batch(Protocol):
    """Some images as a model gets them; a task adds its own fields."""

    @property
    def indices(self) -> Sequence[int]:
        """Their indices in the source."""
        ...

    @property
    def broken(self) -> Sequence[int]:
        """The indices of those that could not be read: other images are in their places."""
        ...


class Images(Protocol):
    """Images of a split, one by one and in batches."""

    @property
    def source(self) -> Any:
        """Where they come from: a `Source`."""
        ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Which images they are, for `irpe eval --json`."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """What the user should know of them."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, sample: "Sample") -> Any: ...

    def collate(self, items: list[Any]) -> Any:
        """Returns a `Batch`."""
        ...

    def __str__(self) -> str:
        """Returns which images they are, in words."""
        ...


class Task(Protocol):
    """What is learned: the data, the model, the loss and the score.

    Args:
        config: The configuration of the run; opening the images fills in their classes.
        weights: Those that the model is built for, in place of the initial ones.

    Examples:
        >>> import irpe.recipes
        >>> from irpe.train.config import make_task
        >>> task = make_task(irpe.recipes.RECIPES["laptop"]())
        >>> len(task.open("val"))
        2000
    """

    Config: ClassVar[type[RunConfig]]  # of its configurations
    measures: ClassVar[tuple[Measure, ...]]  # of its scores, the one that is compared first
    takes: ClassVar[tuple[str, ...]]  # the fields of `Condition` that its images can differ in
    eval_batch: ClassVar[int]  # images per forward pass in evaluation
    config: Any

    def __init__(self, config: Any, weights: Weights | None = None) -> None: ...

    def open(self, split: Split, condition: Condition | None, listen: Listener) -> Images:
        """Returns the images of a split.

        Args:
            split: "train" or "val".
            condition: How they are evaluated; `None`: as they are trained on.
            listen: Hears how a slow preparation goes.
        """
        ...

    def build(self, size: tuple[int, int] | None = None) -> nn.Module:
        """Returns the model at its start, whose randomness follows from torch's random state.

        Args:
            size: The rows and columns of its images, if they are not those of the run.
        """
        ...

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameters in groups, each with a learning rate and a weight decay."""
        ...

    def losses(
        self, model: nn.Module, batches: Sequence[Any], accelerator: "Accelerator"
    ) -> Iterator[Tensor]:
        """Yields the loss of each micro-batch of a step; their mean is the loss of the step.

        What the losses are divided by is the same for all of them and in all processes, so that
        the loss does not depend on how a batch is split.

        Args:
            model: The model.
            batches: The micro-batches of this process.
            accelerator: Knows the device and the other processes.
        """
        ...

    def predict(self, model: nn.Module, batch: Any, device: torch.device) -> list[Any]:
        """Returns what a model in eval mode says of each image: small values, on the CPU."""
        ...

    def score(self, images: Images, predictions: Mapping[int, Any]) -> Score:
        """Returns the score of predictions.

        Args:
            images: The images.
            predictions: What `predict` returned, by the index of the image in the source, in order.
        """
        ...

    def draw(self, images: Images, index: int, prediction: Any, threshold: float | None) -> Any:
        """Returns a Pillow image with a prediction drawn into it, and the truth where it is known.

        Args:
            images: The images.
            index: The index of one in the source.
            prediction: What `predict` returned of it.
            threshold: The least score of what is drawn, where predictions have scores.
        """
        ...
