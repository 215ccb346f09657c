"""The configuration of a run that trains a segmenter."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from irpe.core.learning_rates import ABSOLUTE_LR
from irpe.errors import MissingFileError, UserError, check_choice
from irpe.train.config import (
    COUNT,
    EMBEDDED,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    RunConfig,
    option,
)

HEADS = ("linear", "upsampling")
TRANSFORMERS_MODELS = ("segformer", "upernet")  # as transformers names them; all others are timm's
BACKBONE, TIMM_BACKBONE = "backbone_config", "timm_backbone"  # in the model_args of upernet


@dataclass(frozen=True, kw_only=True)
class SegmenterConfig(RunConfig):
    """A run that trains a vision transformer to segment images.

    Examples:
        >>> import irpe.recipes
        >>> irpe.recipes.RECIPES["seg_small"]().replace(encoding="product-contextual-k").task
        'segmentation'
    """

    task: ClassVar[str] = "segmentation"
    paths: ClassVar[tuple[str, ...]] = ("class_names",)

    model: str = option("Model, by its timm name; or transformers' segformer or upernet.")
    head: str | None = option(
        "What makes classes of the tokens of a timm model: linear, or upsampling (two "
        "convolutions) [linear]; segformer and upernet have heads of their own.",
        None,
    )
    drop_path: float = option("Rate of stochastic depth.", 0.0, FRACTION)

    absolute_lr: float = option(
        "Learning rate of a learned absolute encoding, as a multiple of --lr.",
        ABSOLUTE_LR,
        POSITIVE,
    )
    poly_power: float = option(
        "Polynomial schedule instead of cosine, with this power. 0: cosine.", 0.0, NOT_NEGATIVE
    )

    train_split: str = option("Name of the split to train on.", "train")
    val_split: str = option("Name of the split to evaluate on.", "val")
    limit: int = option("Use only this many images, the first ones; 0: all.", 0, NOT_NEGATIVE)
    ignore_label: int = option(
        "Label value of pixels without a class, which are neither trained on nor scored; for the "
        "layout images/SPLIT and labels/SPLIT.",
        255,
        (range(256).__contains__, "from 0 to 255"),
    )
    class_names: str | None = option(
        "Text file with a name in each line, for the label values from 0 on.", None
    )
    short_side: int = option(
        "Short side of an image after resizing, in pixels; 0: as it is stored.", 0, NOT_NEGATIVE
    )
    crop_height: int = option("Height of a random crop in training, in pixels.", 512, COUNT)
    crop_width: int = option("Width of a random crop in training, in pixels.", 512, COUNT)
    sliding: bool = option(
        "Evaluate windows of the size of a crop and average them, not whole images.", False
    )
    stride: int = option(
        "Pixels between two sliding windows; 0: two thirds of a window each way.", 0, NOT_NEGATIVE
    )

    min_resize: float = option(
        "Least factor by which images are resized before a crop.", 0.5, POSITIVE
    )
    max_resize: float = option("Greatest factor by which images are resized before a crop.", 2.0)
    color_jitter: float = option("Strength of colour jitter.", 0.0, NOT_NEGATIVE)

    @property
    def decay_power(self) -> float:
        """The power of the polynomial schedule; 0: another schedule."""
        return self.poly_power

    @property
    def backbone(self) -> Mapping[str, Any]:
        """The backbone of upernet: its model type and the arguments of its configuration."""
        return self.model_args[BACKBONE]

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of what the model is trained on."""
        return 3, self.crop_height, self.crop_width

    @property
    def title(self) -> str:
        """The model's name, its arguments, and its head or its backbone."""
        arguments = {**self.model_args}
        backbone = arguments.pop(BACKBONE, None)
        words = [self.model, *_in_words(arguments)]
        if backbone is not None:
            sizes = {name: value for name, value in backbone.items() if name != "model_type"}
            words += ["over", backbone["model_type"], *_in_words(sizes)]
        elif self.model not in TRANSFORMERS_MODELS:
            words.append(f"with a head that is {self.head or HEADS[0]}")
        return " ".join(words)

    def with_data(self, data: str) -> Self:
        """Returns the configuration with all of the images of other data, to evaluate on."""
        return super().with_data(data).replace(limit=0)

    def check_data(self) -> None:
        """Raises an error if the data is not there; nothing is read yet."""
        if self.data == EMBEDDED:
            raise UserError("--data is missing: a folder of images with label maps")
        if not Path(self.data).is_dir():
            raise MissingFileError(f"data {self.data!r} is not a folder")

    def check_forward(self, num_images: int) -> None:
        """Raises an error if upernet cannot normalize over the images of a forward pass."""
        if num_images < 2 and self.model == "upernet":
            raise UserError(
                f"{num_images} image per forward pass and device: upernet averages each image to "
                "one pixel and normalizes it over the images, choose 2 or more"
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_model()
        if self.max_resize < self.min_resize:
            raise UserError(
                f"max_resize = {self.max_resize} must be at least min_resize = {self.min_resize}"
            )
        if self.low_lr_epochs and self.poly_power:
            raise UserError(
                f"low_lr_epochs = {self.low_lr_epochs} and poly_power = {self.poly_power} are two "
                "schedules: leave one of them out"
            )
        if self.stride > min(self.crop_height, self.crop_width):
            raise UserError(
                f"stride = {self.stride} leaves gaps between windows of {self.crop_height} x "
                f"{self.crop_width} pixels: choose at most the shorter side"
            )

    def _check_model(self) -> None:
        """Raises an error if head, backbone or initial weights are not for the model."""
        if self.model not in TRANSFORMERS_MODELS:
            if self.head is not None:
                check_choice("head", self.head, HEADS)
            return
        if self.head is not None:
            raise UserError(
                f"head {self.head!r} is for models of timm: {self.model} has a head of its own, "
                "leave it out or set it to none"
            )
        kind = self._check_backbone() if self.model == "upernet" else self.model
        if self.initial == "pretrained" and kind != TIMM_BACKBONE:
            raise UserError(
                f"initial 'pretrained' is for models of timm: for {kind} name a folder that "
                "save_pretrained wrote, or a model of the Hugging Face hub"
            )

    def _check_backbone(self) -> str:
        """Returns the model type of upernet's backbone, or raises an error."""
        backbone: Any = self.model_args.get(BACKBONE)
        kind = backbone.get("model_type") if isinstance(backbone, Mapping) else None
        if not isinstance(kind, str):
            raise UserError(
                f"model_args {dict(self.model_args)}: upernet needs a backbone of transformers, "
                f'for example {{"{BACKBONE}": {{"model_type": "swin"}}}}'
            )
        if kind == TIMM_BACKBONE and not isinstance(backbone.get("backbone"), str):
            raise UserError(
                f"model_args {dict(self.model_args)}: {TIMM_BACKBONE} needs a model of timm, for "
                f'example {{"{BACKBONE}": {{"model_type": "{TIMM_BACKBONE}", "backbone": '
                '"pvt_v2_b0"}}'
            )
        return kind


def _in_words(arguments: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in arguments.items()]
