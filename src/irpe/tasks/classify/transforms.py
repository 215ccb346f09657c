"""Labelled images as tensors: augmented for training, resized and cropped for evaluation."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from irpe.errors import UserError
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.sources import Source
from irpe.train.image_files import CACHE_BYTES, BrokenImageError, convert_mode
from irpe.train.normalization import normalization
from irpe.train.sampling import Sample
from irpe.train.seeding import seeded

Item = tuple[Tensor, int, int, bool]


class Batch(NamedTuple):
    """What the model and the loss get.

    Args:
        images: The images.
        labels: Their classes.
        indices: Their indices in the source.
        broken: Which of them replace an image that could not be read.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    broken: Tensor


class LabelledImages(Dataset[Any]):
    """Images of a source as tensors; a small dataset without augmentation is cached in memory.

    Args:
        source: The images.
        transform: From a Pillow image to a tensor.
        mode: Pillow's name of the colours, "RGB" or "L".
        seed: The seed of the augmentation; `None` if there is none.
    """

    def __init__(
        self, source: Source, transform: Callable[[Any], Tensor], mode: str, seed: int | None
    ) -> None:
        self.source = source
        self.transform = transform
        self.mode = mode
        self.seed = seed
        self.cached: dict[int, Item] = {}

    def __getitem__(self, sample: Sample) -> Item:
        if sample.image in self.cached:
            return self.cached[sample.image]
        image, label, broken = self._read(sample.image)
        if self.seed is not None:
            with seeded(self.seed, sample.epoch, sample.position):
                return self.transform(image), label, sample.image, broken
        item = self.transform(image), label, sample.image, broken
        if item[0].nbytes * len(self.source) < CACHE_BYTES:
            self.cached[sample.image] = item
        return item

    def collate(self, items: list[Item]) -> Batch:
        """Returns a batch."""
        return Batch._make(default_collate(items))

    def _read(self, index: int) -> tuple[Any, int, bool]:
        """Returns an image; the next one that can be read, where it cannot."""
        for other in range(index, index + len(self.source)):
            try:
                image, label = self.source.read(other % len(self.source))
                return convert_mode(image, self.mode), label, other != index
            except BrokenImageError:
                continue
        raise UserError(f"none of the {len(self.source)} images can be read")


def train_images(source: Source, config: ClassifierConfig) -> LabelledImages:
    """Returns images as they are trained on."""
    is_random = bool(
        config.auto_augment
        or config.color_jitter
        or config.flip
        or config.erasing
        or config.min_scale < 1
    )
    if not is_random:
        return eval_images(source, config.replace(crop=1.0))
    colours = _normalization(config)
    _check_policy(config.auto_augment)
    try:
        transform: Any = create_transform(
            config.input_shape,
            is_training=True,
            scale=(config.min_scale, 1.0),
            ratio=(1.0, 1.0) if config.min_scale == 1 else None,
            hflip=config.flip,
            color_jitter=config.color_jitter,
            auto_augment=config.auto_augment or None,
            interpolation="bicubic",
            re_prob=config.erasing,
            re_mode="pixel",
            **colours,
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise UserError(
            f"auto_augment {config.auto_augment!r} is not a policy of timm, such as "
            f"rand-m9-mstd0.5-inc1: {error!r}"
        ) from error
    return LabelledImages(source, transform, _mode(config), config.seed)


def eval_images(
    source: Source, config: ClassifierConfig, preparation: Mapping[str, Any] | None = None
) -> LabelledImages:
    """Returns images as they are evaluated on.

    Args:
        source: The images.
        config: Their size, channels and crop.
        preparation: Their mean and deviation, and what else timm's transforms take; `None`: the
            mean and deviation of the model, resized by cubic interpolation.
    """
    own: Mapping[str, Any] = preparation or _normalization(config)
    values: dict[str, Any] = {"interpolation": "bicubic", **own}
    transform: Any = create_transform(config.input_shape, crop_pct=config.crop, **values)
    return LabelledImages(source, transform, _mode(config), None)


def _check_policy(text: str) -> None:
    """Raises an error for a section of an augmentation policy that timm would leave out."""
    name, *sections = text.split("-")
    for section in sections:
        has_name = name == "rand" and re.fullmatch(r"t[a-z]+", section)
        if not has_name and not re.fullmatch(r"[a-z]+[0-9]+(\.[0-9]+)?", section):
            raise UserError(
                f"auto_augment {text!r}: {section!r} is not a letter or name with a number, such "
                "as m9, mstd0.5 or inc1"
            )


def _mode(config: ClassifierConfig) -> str:
    return "RGB" if config.channels == 3 else "L"


def _normalization(config: ClassifierConfig) -> dict[str, Any]:
    """Returns the mean and deviation of the model's images, averaged for grey ones."""
    values = normalization(config.model)
    if config.channels == 3:
        return values
    return {name: (sum(colours) / len(colours),) for name, colours in values.items()}
