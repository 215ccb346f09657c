"""The configuration of a run that trains a detector."""

from dataclasses import dataclass
from typing import ClassVar, Self

from irpe.errors import UserError
from irpe.train.config import COUNT, EMBEDDED, NOT_NEGATIVE, RunConfig, option


@dataclass(frozen=True, kw_only=True)
class DetectorConfig(RunConfig):
    """A run that trains a DETR.

    Examples:
        >>> import irpe.recipes
        >>> irpe.recipes.RECIPES["detr_small"]().replace(encoding="product-bias-k@2.0").task
        'detection'
    """

    task: ClassVar[str] = "detection"

    backbone: str = option("Network that computes the feature map, by its timm name.", "resnet50")
    backbone_lr: float = option(
        "Learning rate of the backbone; 0: it is frozen.", 1e-5, NOT_NEGATIVE
    )
    backbone_weights: str = option(
        "Weights of the backbone: pretrained, none, or a file.", "pretrained"
    )
    cached_versions: int = option(
        "Cache the features of this many augmented versions of each image (needs --backbone-lr 0). "
        "0: augment anew every epoch.",
        0,
        NOT_NEGATIVE,
    )

    train_split: str = option("Name of the split to train on.", "train")
    val_split: str = option("Name of the split to evaluate on.", "val")
    limit: int = option("Use only this many images, the first ones; 0: all.", 0, NOT_NEGATIVE)
    short_side: int = option("Short side of an image after resizing, in pixels.", 800)
    min_short_side: int = option(
        "Training resizes the short side to a random length from this one up to --short-side, in "
        "steps of 32.",
        480,
        COUNT,
    )
    long_side: int = option("Longest long side of an image after resizing, in pixels.", 1333)
    random_crop: bool = option("Random crops in training, of images or cached features.", True)

    @property
    def title(self) -> str:
        """DETR, and its backbone's name in timm."""
        return f"DETR on {self.backbone}"

    def with_data(self, data: str) -> Self:
        """Returns the configuration with all of the images of other data, to evaluate on."""
        return super().with_data(data).replace(limit=0)

    def check_data(self) -> None:
        """Raises an error if the annotations are not there; nothing is read yet."""
        from irpe.tasks.detect.boxes import find_annotations

        if self.data == EMBEDDED:
            raise UserError("--data is missing: a folder in the layout of COCO or Pascal VOC")
        for split in (self.train_split, self.val_split):
            find_annotations(self.data, split, self.holdout)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.min_short_side <= self.short_side <= self.long_side:
            raise UserError(
                f"min_short_side = {self.min_short_side}, short_side = {self.short_side}, "
                f"long_side = {self.long_side}: none may be less than the one before"
            )
        if self.initial == "pretrained":
            raise UserError(
                "initial 'pretrained' is for classifiers: a detector starts from a run or a file, "
                "its backbone from backbone_weights"
            )
        if self.cached_versions and self.backbone_lr:
            raise UserError(
                f"cached_versions = {self.cached_versions}: features can be cached only if the "
                "backbone is frozen, set backbone_lr to 0"
            )
        if self.cached_versions and self.backbone_weights == "none":
            raise UserError(
                f"cached_versions = {self.cached_versions}: features of a random backbone are not "
                "cached, set backbone_weights to 'pretrained' or to a file"
            )
