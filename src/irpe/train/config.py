"""The configuration of a training run, a frozen value, and the table of tasks.

The fields in `SETTINGS` are options of the command line, with the help text that stands here, and
`--set NAME=VALUE` reaches the others. What only one task needs is in the folder of that task.
"""

import dataclasses
import importlib
import itertools
import json
import os
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_type_hints

from irpe import files
from irpe.core.learning_rates import TABLE_LR
from irpe.errors import MissingFileError, UserError, check_choice

if TYPE_CHECKING:
    from torch import Tensor

    from irpe.train.task import Task

ABSOLUTE = ("keep", "none", "sinusoid")
PRECISIONS = ("no", "bf16", "fp16")
SCHEDULE_PARTS = ("warmup_epochs", "low_lr_epochs")
RUN_FILE = "run.json"  # where a run stores its configuration
EMBEDDED = "embedded"  # the data that comes with the library
DATASETS = ("torch/", "hfds/")  # what the name of a timm dataset starts with


# Fields with an option of their own.
SETTINGS = (
    "data", "encoding", "absolute", "epochs", "warmup_epochs", "batch_size", "image_size", "lr",
    "table_lr", "model_args", "initial", "holdout", "precision", "workers", "seed",
)  # fmt: skip
TASKS = {
    "classification": "irpe.tasks.classify.task:ClassificationTask",
    "detection": "irpe.tasks.detect.task:DetectionTask",
    "segmentation": "irpe.tasks.segment.task:SegmentationTask",
}  # the class of each task; `irpe.train.register_task` adds to it


Rule = tuple[Callable[[Any], bool], str]
COUNT: Rule = (lambda value: value >= 1, "at least 1")
NOT_NEGATIVE: Rule = (lambda value: value >= 0, "at least 0")
POSITIVE: Rule = (lambda value: value > 0, "greater than 0")
FRACTION: Rule = (lambda value: 0 <= value <= 1, "between 0 and 1")
BELOW_1: Rule = (lambda value: 0 <= value < 1, "at least 0 and less than 1")


def one_of(*choices: object) -> Rule:
    """Returns the rule that a value is one of some."""
    return choices.__contains__, f"one of {', '.join(map(str, choices))}"


def option(help_text: str, default: Any = dataclasses.MISSING, rule: Rule | None = None) -> Any:
    """Returns a dataclass field that carries a help text, and a rule for its value."""
    metadata = {"help": help_text, "rule": rule}
    if isinstance(default, dict):
        made: dict[str, Any] = default
        return field(default_factory=lambda: dict(made), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every training run has; the help text of a field says what it means.

    Examples:
        >>> import irpe.recipes, irpe.train
        >>> isinstance(irpe.recipes.RECIPES["laptop"](), irpe.train.RunConfig)
        True
    """

    task: ClassVar[str]
    paths: ClassVar[tuple[str, ...]] = ()  # fields that are paths, besides the data

    encoding: str = option("Relative position encoding, for example product-contextual-k.", "none")
    absolute: str = option("Absolute position encoding: keep, none or sinusoid.", "keep")
    model_args: Mapping[str, Any] = option("More arguments of the model, as JSON.", {})
    initial: str | None = option(
        "Weights to start from: a run, a file, or 'pretrained' (not for detectors).", None
    )

    data: str = option(
        "Classifiers: a folder, tar or idx files, the name of a timm dataset, or 'embedded'. "
        "Detectors: a folder in the layout of COCO or Pascal VOC. Segmenters: a folder of images "
        "and label maps, images/SPLIT and labels/SPLIT or a dataset's own.",
        EMBEDDED,
    )
    holdout: float = option(
        "Fraction held out for validation, of class folders or Pascal VOC without splits.",
        0.0,
        FRACTION,
    )
    classes: tuple[str, ...] = ()  # of the data, filled in when the run begins
    max_broken: float = option("Fraction of the images that may be unreadable.", 0.001, FRACTION)
    flip: float = option("Probability of a horizontal flip in training.", 0.5, FRACTION)

    epochs: int = option("Passes over the training images.", 300, COUNT)
    batch_size: int = option("Images per optimizer step, over all devices.", 1024, COUNT)
    device_batch_size: int = option(
        "Images per forward pass and device; smaller values accumulate gradients. 0: the whole "
        "batch of the device.",
        0,
        NOT_NEGATIVE,
    )
    lr: float = option("Highest learning rate.", 1e-3, POSITIVE)
    table_lr: float = option(
        "Learning rate of the tables of the encoding, as a multiple of --lr.", TABLE_LR, POSITIVE
    )
    min_lr: float = option("Learning rate at the end of the cosine schedule.", 1e-5, NOT_NEGATIVE)
    low_lr_epochs: int = option(
        "Step schedule instead of cosine: a constant learning rate, divided by 10 for this many "
        "epochs at the end. 0: cosine.",
        0,
        NOT_NEGATIVE,
    )
    warmup_lr: float = option("Learning rate at the start of warmup.", 1e-6, NOT_NEGATIVE)
    warmup_epochs: int = option("Epochs in which the learning rate rises to --lr.", 5, NOT_NEGATIVE)
    optimizer: str = option("Optimizer, by its timm name.", "adamw")
    weight_decay: float = option(
        "Weight decay. Tables have none, nor have biases and norms, but for detectors.",
        0.05,
        NOT_NEGATIVE,
    )
    clip_grad: float = option(
        "Clip the norm of the gradient to this value; 0: do not clip.", 0.0, NOT_NEGATIVE
    )
    aug_repeats: int = option(
        "Repeated augmentation: how often an image comes in one epoch, each time augmented "
        "differently; the length of the epoch stays the same.",
        1,
        COUNT,
    )
    ema_decay: float = option(
        "Decay of an exponential moving average of the weights, which is then evaluated and saved "
        "in their place; 0: no average.",
        0.0,
        BELOW_1,
    )

    precision: str = option("Mixed precision: no, bf16 or fp16.", "no")
    compile: bool = option("Compile the model with torch.compile.", False)
    workers: int = option("Processes that load images.", 0, NOT_NEGATIVE)
    eval_every: int = option("Epochs between evaluations; the last is always evaluated.", 1, COUNT)
    save_every: int = option(
        "Steps between checkpoints; one is also saved each epoch.", 1000, COUNT
    )
    seed: int = option("Seed of everything random.", 0)

    @property
    def decay_power(self) -> float:
        """The power of a polynomial schedule; 0: another schedule."""
        return 0.0

    @property
    def input_shape(self) -> tuple[int, int, int] | None:
        """Channels, rows and columns of what the model is trained on, if they are always equal."""
        return None

    @property
    def title(self) -> str:
        """What to call the model."""
        return self.task

    def __reduce__(self) -> Any:
        """Pickles the configuration with where its task is, for processes that do not know it."""
        values = {each.name: getattr(self, each.name) for each in dataclasses.fields(self)}
        return _unpickle, (type(self), values, TASKS.get(self.task))

    def __post_init__(self) -> None:
        _check_fields(self)
        object.__setattr__(self, "classes", tuple(self.classes))  # JSON has lists
        check_choice("absolute", self.absolute, ABSOLUTE)
        check_choice("precision", self.precision, PRECISIONS)
        for name in SCHEDULE_PARTS:
            if getattr(self, name) >= self.epochs:
                raise UserError(
                    f"{name} = {getattr(self, name)} must be less than epochs = {self.epochs}"
                )

    def replace(self, **changes: Any) -> Self:
        """Returns the configuration with some fields changed."""
        for name in changes:
            check_choice(f"field of {self.task}", name, [f.name for f in dataclasses.fields(self)])
        return dataclasses.replace(self, **changes)

    def with_fewer_epochs(self, epochs: int) -> Self:
        """Returns the configuration for fewer epochs: parts of the schedule shrink in proportion.

        Args:
            epochs: The epochs; if there are not fewer of them, the rest stays.
        """
        share = min(1.0, epochs / self.epochs) if epochs > 0 else 1.0
        parts = {name: int(getattr(self, name) * share) for name in SCHEDULE_PARTS}
        return dataclasses.replace(self, epochs=epochs, **parts)

    def with_absolute_paths(self) -> Self:
        """Returns the configuration with paths that mean the same in every working directory."""
        own = () if self.data == "" or is_name(self.data) else ("data",)
        named = {name: getattr(self, name) for name in (*own, *self.paths)}
        return self.replace(
            **{name: path and os.path.abspath(path) for name, path in named.items()}
        )

    def with_data(self, data: str) -> Self:
        """Returns the configuration with all of the images of other data, to evaluate on.

        Of the folder that a run held images out of, these alone are evaluated on: the run has seen
        the others.
        """
        is_path = self.holdout > 0 and not is_name(data)
        if is_path and os.path.realpath(data) == os.path.realpath(self.data):
            return self
        return self.replace(data=data, holdout=0.0)

    def check_data(self) -> None:
        """Raises an error if the data is not there, before anything slow is imported or read."""

    def check_forward(self, num_images: int) -> None:
        """Raises an error if a forward pass in training cannot have that many images."""

    def check_classes(self, classes: Sequence[str]) -> None:
        """Raises an error unless the classes of the data are those that the run began with.

        Data without names (idx files) have the labels in their place, which fit any names.
        """
        labels = tuple(map(str, range(len(classes))))
        is_unnamed = len(classes) == len(self.classes) and labels in (tuple(classes), self.classes)
        if not self.classes or tuple(classes) == self.classes or is_unnamed:
            return
        pairs = itertools.zip_longest(classes, self.classes)
        label, (found, own) = next((i, p) for i, p in enumerate(pairs) if p[0] != p[1])
        raise UserError(
            f"{self.data} has other classes than the run was trained on: class {label} is "
            f"{found!r}, in the run {own!r} ({len(classes)} and {len(self.classes)} classes); "
            "restore the names and the order of the classes"
        )

    def to_json(self) -> str:
        """Returns the configuration as text that `irpe.train.config.parse_config` reads."""
        return files.to_json({"task": self.task, **dataclasses.asdict(self)})


def _unpickle(kind: type[RunConfig], values: dict[str, Any], plug: str | None) -> RunConfig:
    if plug is not None:
        TASKS.setdefault(kind.task, plug)
    return kind(**values)


def is_name(data: str) -> bool:
    """Returns whether data is known by a name, and not the path of a file or folder."""
    return data == EMBEDDED or data.startswith(DATASETS)


def check_exists(data: str) -> None:
    """Raises an error for the path of data that is not there."""
    if not is_name(data) and not Path(data).exists():
        raise MissingFileError(f"data {data!r} does not exist: pass a folder, or the name of data")


def _check_fields(config: RunConfig) -> None:
    """Raises an error unless every field is of its type, for JSON has others, and by its rule."""
    hints = get_type_hints(type(config))
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        for rule in (_TYPES[hints[each.name]], each.metadata.get("rule")):
            if rule is not None and not rule[0](value):
                raise UserError(f"{each.name} = {reprlib.repr(value)} must be {rule[1]}")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # not NaN either


_TYPES: dict[Any, Rule] = {
    str: (_is_text, "text"),
    str | None: (lambda value: value is None or _is_text(value), "text or null"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: type(value) is int and abs(value) < 2**63, "a whole number"),
    float: (_is_number, "a finite number"),
    Mapping[str, Any]: (
        lambda value: isinstance(value, Mapping) and all(map(_is_text, value)),
        'an object, as in {"depth": 6}',
    ),
    tuple[str, ...]: (
        lambda value: isinstance(value, list | tuple) and all(map(_is_text, value)),
        "a list of texts",
    ),
}


def register_task(name: str, plug: str) -> None:
    """Makes a task known, also in the processes of an ablation, wherever these are.

    Args:
        name: Its name, which its configuration has as `task`.
        plug: Where its class is, as in "package.module:Class". `irpe.train.Task` says what it has.

    Examples:
        >>> import irpe.train
        >>> irpe.train.register_task("poses", "my_project.poses:PoseTask")
    """
    module, colon, owner = plug.partition(":")
    if not (module and colon and owner):
        raise UserError(f"task {name!r}: {plug!r} is not of the form package.module:Class")
    TASKS[name] = plug


def find_task(name: str) -> "type[Task]":
    """Returns the class of a task."""
    check_choice("task", name, TASKS)
    module, _, owner = TASKS[name].partition(":")
    return getattr(importlib.import_module(module), owner)


def make_task(config: RunConfig, weights: "dict[str, Tensor] | None" = None) -> "Task":
    """Returns the task of a configuration."""
    return find_task(config.task)(config, weights)


def parse_config(text: str, path: Path = Path(RUN_FILE)) -> RunConfig:
    """Returns the configuration that `RunConfig.to_json` wrote; fields it lacks are default."""
    try:
        written: dict[str, Any] = json.loads(text)
        content = {name: value for name, value in written.items() if name != "sha256"}
        name: Any = content.pop("task")
        is_known = name in TASKS
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not the configuration of a run: {error!r}") from error
    if not is_known:
        raise UserError(f"{path} is of the task {name!r}, not one of {', '.join(TASKS)}")
    config = find_task(name).Config
    unknown = sorted(set(content) - {each.name for each in dataclasses.fields(config)})
    if unknown:
        raise UserError(
            f"{path} is of another release (unknown settings: {', '.join(unknown)}): read it with "
            "that release, or train again"
        )
    try:
        parsed = config(**content)
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except TypeError as error:
        raise UserError(f"{path} lacks a setting: {error}") from error
    files.check_json(written, path)
    return parsed
