"""What a task is: the contract of training and evaluation with what is learned.

A task is a class with four facts and seven methods. Everything above it (training, evaluation,
ablation, pictures, progress) is written once and knows no task: `irpe.train.register_task` adds
one. Its scores name themselves: tables, curves, bars and ablations print them, whatever the task.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import isnan
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from irpe.errors import UserError
from irpe.progress import Listener
from irpe.train.config import RunConfig

if TYPE_CHECKING:  # so that curves are drawn without torch
    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn

    from irpe.train.processes import Sample

Split = Literal["train", "val"]


@dataclass(frozen=True)
class Measure:
    """What a number of a score means.

    Args:
        key: Its name in files and in `--json`.
        name: What to call it.
        unit: "%", or nothing for a fraction or a loss.
        higher_is_better: Whether more of it is better.
        digits: How many digits after the point are shown.
        brief: Show it in the one line of an epoch, too.

    Examples:
        >>> import irpe.train
        >>> irpe.train.Measure("top1", "top-1", "%").text(75.3)
        'top-1 75.30'
    """

    key: str
    name: str
    unit: str = ""
    higher_is_better: bool = True
    digits: int = 2
    brief: bool = True

    def text(self, value: float) -> str:
        """Returns a value with its name, such as "top-1 75.30"."""
        return f"{self.name} {value:.{self.digits}f}"


@dataclass(frozen=True)
class Score:
    """What an evaluation found.

    Args:
        measures: What its numbers mean; the first is the one that is compared.
        details: The numbers, by the key of their measure; NaN where there is none.
        values: A number for each readable image, in the order of the images, whose mean is the
            compared one; empty where it is not such a mean.
        classes: The compared number of each class, where it has one.
        chance: The compared number of the best answer that does not look at the image.
        num_images: The images that count.
        num_broken: The images that could not be read.
        files: What `irpe eval` stores beside the score, by the name of the file.

    Examples:
        >>> from irpe.train.task import Measure, Score
        >>> top1, loss = Measure("top1", "top-1", "%"), Measure("val_loss", "loss", digits=4)
        >>> score = Score((top1, loss), {"top1": 75.0, "val_loss": 0.7}, num_images=4)
        >>> score.line()
        'top-1 75.00  loss 0.7000'
    """

    measures: tuple[Measure, ...]
    details: Mapping[str, float]
    values: tuple[float, ...] = ()
    classes: Mapping[str, float] = field(default_factory=dict[str, float])
    chance: float | None = None
    num_images: int = 0
    num_broken: int = 0
    files: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def measure(self) -> Measure:
        """What is compared."""
        return self.measures[0]

    @property
    def value(self) -> float:
        """The number that is compared."""
        return self.details[self.measure.key]

    def line(self, brief: bool = False) -> str:
        """Returns the score in words.

        Args:
            brief: Only the numbers that matter most.
        """
        shown = [measure for measure in self.measures if measure.brief or not brief]
        known = ((m, self.details[m.key]) for m in shown)
        return "  ".join(m.text(value) for m, value in known if not isnan(value))

    def row(self) -> dict[str, float]:
        """Returns the columns of the run's table."""
        return {**self.details, "val_broken": self.num_broken}

    def report(self) -> dict[str, Any]:
        """Returns what scores.json and `irpe eval --json` hold of it; null where there is none."""
        numbers = {key.removeprefix("val_"): _or_none(v) for key, v in self.details.items()}
        classes = {name: _or_none(value) for name, value in self.classes.items()}
        counts = {"num_images": self.num_images, "num_broken": self.num_broken}
        return {**numbers, **({"classes": classes} if classes else {}), **counts}

    def to_json(self) -> dict[str, Any]:
        """Returns all but the files, as `from_json` takes it."""
        content = {**asdict(self), "values": list(self.values)}
        content["measures"] = [asdict(measure) for measure in self.measures]
        del content["files"]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Self:
        """Returns the score that `to_json` described."""
        measures = tuple(Measure(**measure) for measure in content["measures"])
        fields: dict[str, Any] = {**content, "values": tuple(content["values"])}
        fields["measures"] = measures
        return cls(**fields)


def _or_none(value: float) -> float | None:
    return None if isnan(value) else value


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

    def __init__(self, config: Any, weights: "dict[str, Tensor] | None" = None) -> None: ...

    def open(self, split: Split, condition: Condition | None, listen: Listener) -> Images:
        """Returns the images of a split.

        Args:
            split: "train" or "val".
            condition: How they are evaluated; `None`: as they are trained on.
            listen: Hears how a slow preparation goes.
        """
        ...

    def build(self, size: tuple[int, int] | None = None) -> "nn.Module":
        """Returns the model at its start, whose randomness follows from torch's random state.

        Args:
            size: The rows and columns of its images, if they are not those of the run.
        """
        ...

    def groups(self, model: "nn.Module") -> list[dict[str, Any]]:
        """Returns the parameters in groups, each with a learning rate and a weight decay."""
        ...

    def losses(
        self, model: "nn.Module", batches: Sequence[Any], accelerator: "Accelerator"
    ) -> "Iterator[Tensor]":
        """Yields the loss of each micro-batch of a step; their mean is the loss of the step.

        What the losses are divided by is the same for all of them and in all processes, so that
        the loss does not depend on how a batch is split.

        Args:
            model: The model.
            batches: The micro-batches of this process.
            accelerator: Knows the device and the other processes.
        """
        ...

    def predict(self, model: "nn.Module", batch: Any, device: "torch.device") -> list[Any]:
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
