"""The whole description of a training run, as one value that is checked when it is made."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ABSOLUTE = ("keep", "none", "sinusoid")
PRECISIONS = ("no", "bf16", "fp16")
RUN_FILE = "run.json"  # where a run keeps its configuration


def _help(text: str, default: Any = dataclasses.MISSING) -> Any:
    if isinstance(default, dict):
        made: dict[str, Any] = default
        return field(default_factory=lambda: dict(made), metadata={"help": text})
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """A run that trains an image classifier; each field says what it means in its help."""

    model: str = _help("Model, by its timm name.")
    encoding: str = _help("Relative encoding, for example product-contextual-k.", "none")
    absolute: str = _help("Absolute encoding: keep, none or sinusoid.", "keep")
    builtin_bias: str = _help("Relative bias that a Swin has of its own: keep or drop.", "keep")
    model_args: Mapping[str, Any] = _help("More arguments of the model, as JSON.", {})
    initial: str | None = _help("Weights to start from: a run, a file, or 'pretrained'.", None)

    data: str = _help(
        "A folder, tar or idx files, a timm data set name, or 'embedded'.", "embedded"
    )
    root: str | None = _help("Where a data set given by its name is kept.", None)
    holdout: float = _help("Fraction held out for validation if there is no such split.", 0.0)
    max_broken: float = _help("Fraction of images that may be unreadable.", 0.001)
    image_size: int = _help("Height and width of the input.", 224)
    channels: int = _help("Channels of the input: 3, or 1 for grey images.", 3)
    crop: float = _help("Part of an image that evaluation looks at.", 0.875)

    epochs: int = _help("Passes over the data.", 300)
    batch_size: int = _help("Images of one step, over all devices.", 1024)
    device_batch_size: int = _help("Most images at a time on a device; 0: all of its share.", 0)
    lr: float = _help("Highest learning rate.", 1e-3)
    min_lr: float = _help("Learning rate at the end.", 1e-5)
    warmup_lr: float = _help("Learning rate at the start.", 1e-6)
    warmup_epochs: int = _help("Epochs until the highest learning rate.", 5)
    optimizer: str = _help("Optimizer, by its timm name.", "adamw")
    weight_decay: float = _help("Weight decay; tables, biases and norms have none.", 0.05)
    clip_grad: float = _help("Largest norm of the gradient; 0: any.", 0.0)

    label_smoothing: float = _help("Label smoothing.", 0.1)
    drop_path: float = _help("Rate of stochastic depth.", 0.1)
    auto_augment: str = _help("timm's name of an augmentation policy; '': none.", "")
    color_jitter: float = _help("Strength of colour jitter.", 0.0)
    min_scale: float = _help("Smallest part that a random crop shows; 1: no such crop.", 1.0)
    flip: float = _help("Probability of a horizontal flip.", 0.5)
    erasing: float = _help("Probability of random erasing.", 0.0)
    mixup: float = _help("Strength of mixup; 0: none.", 0.0)
    cutmix: float = _help("Strength of cutmix; 0: none.", 0.0)
    repeats: int = _help("Augmented copies of an image in one epoch.", 1)
    ema_decay: float = _help("Decay of the averaged weights, then the ones kept; 0: none.", 0.0)

    precision: str = _help("Mixed precision: no, bf16 or fp16.", "no")
    compile: bool = _help("Compile the model with torch.compile.", False)
    workers: int = _help("Processes that read images.", 0)
    save_every: int = _help("Steps between checkpoints; one is also made each epoch.", 1000)
    seed: int = _help("Seed of everything random.", 0)

    def __post_init__(self) -> None:
        _check_choice("absolute", self.absolute, ABSOLUTE)
        _check_choice("builtin_bias", self.builtin_bias, ("keep", "drop"))
        _check_choice("precision", self.precision, PRECISIONS)
        _check_choice("channels", self.channels, (1, 3))
        for name in ("epochs", "batch_size", "image_size", "repeats", "save_every"):
            _check_range(self, name, 1, None)
        for name in ("lr", "crop"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)} must be greater than 0")
        for name in (
            "device_batch_size", "min_lr", "warmup_lr", "warmup_epochs", "weight_decay",
            "clip_grad", "color_jitter", "mixup", "cutmix", "workers",
        ):  # fmt: skip
            _check_range(self, name, 0, None)
        for name in (
            "holdout", "max_broken", "label_smoothing", "drop_path", "min_scale", "flip", "erasing",
            "ema_decay", "crop",
        ):  # fmt: skip
            _check_range(self, name, 0, 1)
        for name in ("label_smoothing", "ema_decay"):
            if getattr(self, name) == 1:
                raise ValueError(f"{name} = 1 must be less than 1")
        if self.warmup_epochs >= self.epochs:
            raise ValueError(
                f"warmup_epochs = {self.warmup_epochs} must be less than epochs = {self.epochs}"
            )

    def replace(self, **changes: Any) -> "TrainConfig":
        """Returns the configuration with some fields changed."""
        for name in changes:
            _check_choice("field", name, [f.name for f in dataclasses.fields(self)])
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """Returns the configuration as text that `from_json` reads."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "TrainConfig":
        """Returns the configuration that `to_json` wrote."""
        try:
            fields = json.loads(text)
            return cls(**fields)
        except (TypeError, ValueError) as error:
            raise ValueError(f"not the configuration of a run: {error}") from error


def _check_choice(name: str, value: Any, choices: Any) -> None:
    if value in choices:
        return
    near = difflib.get_close_matches(str(value), [str(choice) for choice in choices], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"{name} {value!r} is not one of {', '.join(map(str, choices))}{hint}")


def _check_range(config: TrainConfig, name: str, low: float, high: float | None) -> None:
    value = getattr(config, name)
    if not value >= low or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise ValueError(f"{name} = {value} must be {limits}")
