"""Labelled images as tensors: augmented for training, resized and cropped for evaluation."""

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from PIL import Image
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from irpe.errors import UserError
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.sources import Source, describe_val
from irpe.train.images import (
    CACHE_BYTES,
    BrokenImageError,
    colours_of_channels,
    convert_mode,
    has_colours,
    preparation_of,
    read_or_next,
)
from irpe.train.processes import Sample, seeded

Item = tuple[Tensor, int, int, bool]
_DIRECTIONS = ((0, 1), (1, 0), (0, -1), (-1, 0))  # right, down, left, up
_WORDS = {
    "held-out": "the part of {} held out in training",
    "val": "the val split of {}",
    "all": "all of {}",
}


class Batch(NamedTuple):
    """What the model and the loss get.

    Args:
        images: The images.
        labels: Their classes.
        indices: Their indices in the source.
        broken: The indices of those that another image replaces, as they could not be read.
    """

    images: Tensor
    labels: Tensor
    indices: list[int]
    broken: list[int]


class LabelledImages(Dataset[Any]):
    """Images of a source as tensors; a small dataset without augmentation is cached in memory."""

    def __init__(
        self,
        source: Source,
        transform: Callable[[Any], Tensor],
        config: ClassifierConfig,
        seed: int | None,
    ) -> None:
        self.source, self.transform, self.config, self.seed = source, transform, config, seed
        self.mode = "RGB" if config.channels == 3 else "L"
        self.shift = 0
        self.cached: dict[int, Item] = {}

    def shifted(self, pixels: int) -> "LabelledImages":
        """Returns the images, shifted by some pixels; what is cached is shared.

        Grey images leave black where they were: their objects mostly lie on it. Images with colours
        are reflected at the border, for black there costs a model even if it cannot see position.
        """
        other = copy.copy(self)
        other.shift = pixels
        return other

    @property
    def facts(self) -> dict[str, Any]:
        """Which images they are."""
        return {"images": describe_val(self.config)}

    @property
    def notes(self) -> tuple[str, ...]:
        """Says that colours are lost, where they are."""
        if self.mode == "RGB" or not any(map(self._has_colours, (0, len(self.source) // 2))):
            return ()
        return ("the images have colours, and are made grey: --channels 3 keeps the colours",)

    def _has_colours(self, index: int) -> bool:
        try:
            return has_colours(self.source.read(index)[0])
        except BrokenImageError:
            return False

    def __str__(self) -> str:
        return _WORDS[describe_val(self.config)].format(self.config.data)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, sample: Sample) -> Item:
        item = self.cached.get(sample.image)
        if item is None:
            (image, label), is_broken = read_or_next(self._read, sample.image, len(self.source))
            if self.seed is not None:
                with seeded(self.seed, sample.epoch, sample.position):
                    return self.transform(image), label, sample.image, is_broken
            item = self.transform(image), label, sample.image, is_broken
            if item[0].nbytes * len(self.source) < CACHE_BYTES:
                self.cached[sample.image] = item
        if not self.shift:
            return item
        black = self.transform(Image.new("L", (8, 8)))[:, 0, 0] if self.mode == "L" else None
        return shift_image(item[0], self.shift, sample.position, black), *item[1:]

    def collate(self, items: list[Item]) -> Batch:
        """Returns a batch."""
        images, labels, indices, broken = zip(*items, strict=True)
        lost = [index for index, is_lost in zip(indices, broken, strict=True) if is_lost]
        return Batch(
            default_collate(list(images)), default_collate(list(labels)), list(indices), lost
        )

    def _read(self, index: int) -> tuple[Any, int]:
        image, label = self.source.read(index)
        return convert_mode(image, self.mode), label


def shift_image(
    image: Float[Tensor, "channel row column"],
    distance: int,
    position: int,
    black: Float[Tensor, " channel"] | None = None,
) -> Float[Tensor, "channel row column"]:
    """Returns an image shifted by some pixels: right, down, left and up in turn.

    Args:
        image: The image.
        distance: How many pixels.
        position: Its position among others.
        black: What comes into view, a value for each channel; `None`: the image reflected at its
            border.
    """
    for axis, step in zip((1, 2), _DIRECTIONS[position % len(_DIRECTIONS)], strict=True):
        size = image.shape[axis]
        at = torch.arange(size) - distance * step
        period = max(2 * (size - 1), 1)
        reflected = (at % period - (size - 1)).abs().neg() + (size - 1)
        image = image.index_select(axis, reflected)
        if black is not None:
            outside = ((at < 0) | (at >= size)).unflatten(0, (-1, 1) if axis == 1 else (1, -1))
            image = torch.where(outside, black.view(-1, 1, 1), image)
    return image


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
            **colours_of_channels(preparation_of(config.model), config.channels),
        )
    except (AssertionError, KeyError) as error:
        raise UserError(
            f"auto_augment {config.auto_augment!r} is not a policy of timm, such as "
            f"rand-m9-mstd0.5-inc1: {error!r}"
        ) from error
    return LabelledImages(source, transform, config, config.seed)


def eval_images(
    source: Source,
    config: ClassifierConfig,
    preparation: Mapping[str, Any] | None = None,
    size: tuple[int, int] | None = None,
) -> LabelledImages:
    """Returns images as they are evaluated on.

    Args:
        source: The images.
        config: Their size, channels and crop.
        preparation: Their mean and deviation, and what else timm's transforms take; `None`: the
            mean and deviation of the model, resized by cubic interpolation.
        size: Their rows and columns, if they are not those of the configuration.
    """
    own = preparation or colours_of_channels(preparation_of(config.model), config.channels)
    values: dict[str, Any] = {"interpolation": "bicubic", **own}
    shape = config.input_shape if size is None else (config.channels, *size)
    transform: Any = create_transform(shape, crop_pct=config.crop, **values)
    return LabelledImages(source, transform, config, None)


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
