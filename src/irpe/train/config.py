"""The whole description of a training run, as one value that is checked when it is made."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

ABSOLUTE = ("keep", "none", "sinusoid")
PRECISIONS = ("no", "bf16", "fp16")
RUN_FILE = "run.json"  # where a run keeps its configuration


def _help(text: str, default: Any = dataclasses.MISSING) -> Any:
    if isinstance(default, dict):
        made: dict[str, Any] = default
        return field(default_factory=lambda: dict(made), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What every run that trains a model has; each field says what it means in its help."""

    task: ClassVar[str]

    encoding: str = _help("Relative encoding, for example product-contextual-k.", "none")
    absolute: str = _help("Absolute encoding: keep, none or sinusoid.", "keep")
    model_args: Mapping[str, Any] = _help("More arguments of the model, as JSON.", {})
    initial: str | None = _help(
        "Weights to start from: a run, a file, or, for classifiers, 'pretrained'.", None
    )

    data: str = _help(
        "For classifiers a folder, tar or idx files, a timm data set name, or 'embedded'; for "
        "detectors a folder in the layout of COCO or Pascal VOC.",
        "embedded",
    )
    flip: float = _help("Probability of a horizontal flip.", 0.5)

    epochs: int = _help("Passes over the data.", 300)
    batch_size: int = _help("Images of one step, over all devices.", 1024)
    device_batch_size: int = _help("Most images at a time on a device; 0: all of its share.", 0)
    lr: float = _help("Highest learning rate.", 1e-3)
    min_lr: float = _help("Learning rate at the end of a cosine.", 1e-5)
    last_epochs: int = _help(
        "Epochs at the end with a tenth of the learning rate, constant before; 0: a cosine.", 0
    )
    warmup_lr: float = _help("Learning rate at the start.", 1e-6)
    warmup_epochs: int = _help("Epochs until the highest learning rate.", 5)
    optimizer: str = _help("Optimizer, by its timm name.", "adamw")
    weight_decay: float = _help(
        "Weight decay; tables have none, nor have biases and norms of classifiers.", 0.05
    )
    clip_grad: float = _help("Largest norm of the gradient; 0: any.", 0.0)
    repeats: int = _help("Augmented copies of an image in one epoch.", 1)
    ema_decay: float = _help("Decay of the averaged weights, then the ones kept; 0: none.", 0.0)

    precision: str = _help("Mixed precision: no, bf16 or fp16.", "no")
    compile: bool = _help("Compile the model with torch.compile.", False)
    workers: int = _help("Processes that read images.", 0)
    eval_every: int = _help("Epochs between evaluations; the last is always evaluated.", 1)
    save_every: int = _help("Steps between checkpoints; one is also made each epoch.", 1000)
    seed: int = _help("Seed of everything random.", 0)

    def __post_init__(self) -> None:
        _check_choice("absolute", self.absolute, ABSOLUTE)
        _check_choice("precision", self.precision, PRECISIONS)
        _check_at_least(self, 1, "epochs", "batch_size", "repeats", "eval_every", "save_every")
        _check_positive(self, "lr")
        _check_at_least(
            self, 0, "device_batch_size", "min_lr", "last_epochs", "warmup_lr", "warmup_epochs",
            "weight_decay", "clip_grad", "workers",
        )  # fmt: skip
        _check_fraction(self, "ema_decay", "flip")
        _check_below_1(self, "ema_decay")
        for name in ("warmup_epochs", "last_epochs"):
            if getattr(self, name) >= self.epochs:
                raise ValueError(
                    f"{name} = {getattr(self, name)} must be less than epochs = {self.epochs}"
                )

    def replace(self, **changes: Any) -> Self:
        """Returns the configuration with some fields changed."""
        for name in changes:
            _check_choice(f"field of {self.task}", name, [f.name for f in dataclasses.fields(self)])
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """Returns the configuration as text that `parse_config` reads."""
        return json.dumps({"task": self.task, **dataclasses.asdict(self)}, indent=2) + "\n"


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(RunConfig):
    """A run that trains an image classifier."""

    task: ClassVar[str] = "classification"

    model: str = _help("Model, by its timm name.")
    builtin_bias: str = _help("Relative bias that a Swin has of its own: keep or drop.", "keep")

    root: str | None = _help("Where a data set given by its name is kept.", None)
    holdout: float = _help("Fraction held out for validation if there is no such split.", 0.0)
    max_broken: float = _help("Fraction of images that may be unreadable.", 0.001)
    image_size: int = _help("Height and width of the input.", 224)
    channels: int = _help("Channels of the input: 3, or 1 for grey images.", 3)
    crop: float = _help("Part of an image that evaluation looks at.", 0.875)

    label_smoothing: float = _help("Label smoothing.", 0.1)
    drop_path: float = _help("Rate of stochastic depth.", 0.1)
    auto_augment: str = _help("timm's name of an augmentation policy; '': none.", "")
    color_jitter: float = _help("Strength of colour jitter.", 0.0)
    min_scale: float = _help("Smallest part that a random crop shows; 1: no such crop.", 1.0)
    erasing: float = _help("Probability of random erasing.", 0.0)
    mixup: float = _help("Strength of mixup; 0: none.", 0.0)
    cutmix: float = _help("Strength of cutmix; 0: none.", 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_choice("builtin_bias", self.builtin_bias, ("keep", "drop"))
        _check_choice("channels", self.channels, (1, 3))
        _check_at_least(self, 1, "image_size")
        _check_at_least(self, 0, "color_jitter", "mixup", "cutmix")
        _check_fraction(
            self, "holdout", "max_broken", "label_smoothing", "drop_path", "min_scale",
            "erasing", "crop",
        )  # fmt: skip
        _check_positive(self, "crop")
        _check_below_1(self, "label_smoothing")


@dataclass(frozen=True, kw_only=True)
class DetectorConfig(RunConfig):
    """A run that trains a DETR, which finds objects in images."""

    task: ClassVar[str] = "detection"

    backbone: str = _help("Network that makes the feature map, by its timm name.", "resnet50")
    backbone_lr: float = _help("Learning rate of the backbone; 0: it is not trained.", 1e-5)
    backbone_weights: str = _help(
        "Weights of the backbone: pretrained, none, or a file.", "pretrained"
    )
    views: int = _help("Versions of an image to choose from; 0: a new one each time.", 0)

    train_split: str = _help("The images to train on.", "train")
    val_split: str = _help("The images to evaluate on.", "val")
    limit: int = _help("Use the first images only, this many; 0: all.", 0)
    short_side: int = _help("Length of an image's short side.", 800)
    min_short_side: int = _help("The smallest in training, up to short_side by 32.", 480)
    long_side: int = _help("Length of an image's long side at most.", 1333)
    random_crop: bool = _help("Crop images, or kept feature maps, at random in training.", True)
    classes: tuple[str, ...] = ()  # of the data, filled in when the run begins

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_at_least(self, 0, "backbone_lr", "views", "limit")
        _check_at_least(self, 1, "min_short_side")
        _check_at_least(self, self.min_short_side, "short_side")
        _check_at_least(self, self.short_side, "long_side")
        if self.initial == "pretrained":
            raise ValueError(
                "initial 'pretrained' is for classifiers: a detector starts from a run or a file, "
                "its backbone from backbone_weights"
            )
        if self.views and self.backbone_lr:
            raise ValueError(
                f"views = {self.views}: kept versions need a backbone that is not trained, set "
                "backbone_lr to 0"
            )
        if self.views and self.backbone_weights == "none":
            raise ValueError(
                f"views = {self.views}: kept versions need a backbone with weights, set "
                "backbone_weights to 'pretrained' or to a file"
            )
        object.__setattr__(self, "classes", tuple(self.classes))  # JSON has lists


Config = ClassifierConfig | DetectorConfig
_TASKS = {config.task: config for config in (ClassifierConfig, DetectorConfig)}


def parse_config(text: str) -> Config:
    """Returns the configuration that `to_json` wrote."""
    try:
        fields = json.loads(text)
        return _TASKS[fields.pop("task", "classification")](**fields)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"not the configuration of a run: {error!r}") from error


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} {value!r} is not one of {', '.join(map(str, choices))}{hint}")


def _check_at_least(config: RunConfig, low: float, *names: str) -> None:
    for name in names:
        if not getattr(config, name) >= low:
            raise ValueError(f"{name} = {getattr(config, name)} must be at least {low}")


def _check_fraction(config: RunConfig, *names: str) -> None:
    for name in names:
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name} = {getattr(config, name)} must be between 0 and 1")


def _check_positive(config: RunConfig, name: str) -> None:
    if not getattr(config, name) > 0:
        raise ValueError(f"{name} = {getattr(config, name)} must be greater than 0")


def _check_below_1(config: RunConfig, name: str) -> None:
    if getattr(config, name) == 1:
        raise ValueError(f"{name} = 1 must be less than 1")
