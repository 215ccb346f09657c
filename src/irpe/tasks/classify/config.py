"""The configuration of a run that trains an image classifier."""

from dataclasses import dataclass
from typing import ClassVar, Self

from irpe.core.learning_rates import ABSOLUTE_LR
from irpe.errors import UserError
from irpe.train.config import (
    BELOW_1,
    COUNT,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    RunConfig,
    one_of,
    option,
)

MIN_CROP = 0.1  # images are resized to image_size / crop, which is not to exceed the memory


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig(RunConfig):
    """A run that trains an image classifier.

    Examples:
        >>> import irpe.recipes
        >>> irpe.recipes.RECIPES["laptop"]().replace(encoding="product-contextual-k").encoding
        'product-contextual-k'
    """

    task: ClassVar[str] = "classification"
    paths: ClassVar[tuple[str, ...]] = ("root",)

    model: str = option("Model, by its timm name.")
    builtin_bias: str = option(
        "The relative bias that Swin has itself: keep or drop.", "keep", one_of("keep", "drop")
    )

    absolute_lr: float = option(
        "Learning rate of a learned absolute encoding, as a multiple of --lr.",
        ABSOLUTE_LR,
        POSITIVE,
    )
    root: str | None = option("Where a dataset given by its name is stored.", None)
    image_size: int = option("Height and width of the input.", 224, COUNT)
    channels: int = option("Channels of the input: 3, or 1 for grey images.", 3, one_of(1, 3))
    crop: float = option(
        "Side of the centre crop in evaluation, relative to the image.",
        0.875,
        (lambda value: MIN_CROP <= value <= 1, f"from {MIN_CROP} to 1"),
    )

    label_smoothing: float = option("Label smoothing.", 0.1, BELOW_1)
    drop_path: float = option("Rate of stochastic depth.", 0.1, FRACTION)
    auto_augment: str = option("timm's name of an augmentation policy; '': none.", "")
    color_jitter: float = option("Strength of colour jitter.", 0.0, NOT_NEGATIVE)
    min_scale: float = option(
        "Smallest area of a random crop, relative to the image; 1: no random crop.", 1.0, FRACTION
    )
    erasing: float = option("Probability of random erasing.", 0.0, FRACTION)
    mixup: float = option("Strength of mixup; 0: none.", 0.0, NOT_NEGATIVE)
    cutmix: float = option("Strength of cutmix; 0: none.", 0.0, NOT_NEGATIVE)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, rows and columns of what the model is trained on."""
        return self.channels, self.image_size, self.image_size

    @property
    def title(self) -> str:
        """The model's name in timm, and its arguments."""
        return " ".join([self.model, *(f"{k}={value}" for k, value in self.model_args.items())])

    def with_data(self, data: str) -> Self:
        """Returns the configuration with all of the images of other data, to evaluate on."""
        other = super().with_data(data)
        return other if other is self else other.replace(root=None)

    def check_data(self) -> None:
        """Raises an error if there are no images; nothing is read yet."""
        from irpe.tasks.classify.sources import check_images

        check_images(self.data, self.root, self.holdout)

    def check_forward(self, num_images: int) -> None:
        """Raises an error if the images of a forward pass cannot be paired."""
        if num_images % 2 and (self.mixup or self.cutmix):
            raise UserError(
                f"mixup and cutmix pair images: {num_images} per forward pass and device must be "
                "even"
            )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.color_jitter and self.auto_augment and "3a" not in self.auto_augment:
            raise UserError(
                f"color_jitter = {self.color_jitter} does nothing beside auto_augment "
                f"{self.auto_augment!r}, which changes colours itself: leave one of them out"
            )
