"""Images with label maps as a segmenter gets them: random crops, or whole images."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, UInt8
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from irpe.tasks.segment.config import TIMM_BACKBONE, TRANSFORMERS_MODELS, SegmenterConfig
from irpe.tasks.segment.labels import IGNORED, Layout
from irpe.tasks.segment.windows import Windows, windows_of
from irpe.train.images import CACHE_BYTES, preparation_of, read_or_next
from irpe.train.processes import Sample, seeded
from irpe.train.task import AS_TRAINED, Condition

Pixels = UInt8[Tensor, "channel row column"]
Labels = UInt8[Tensor, "row column"]
Item = tuple[Float[Tensor, "channel row column"], Labels, int, bool]
_F = v2.functional


class PixelBatch(NamedTuple):
    """What a segmenter and its loss get.

    Args:
        images: The images, of one size in training.
        labels: The class of each pixel; whole label maps as they are stored, in evaluation.
        indices: The indices of the images in the source.
        broken: The indices of those that another image replaces, as they could not be read.
        windows: The sliding windows to evaluate; `None` for whole images.
    """

    images: list[Tensor]
    labels: list[Tensor]
    indices: list[int]
    broken: list[int]
    windows: Windows | None


class PixelImages(Dataset[Any]):
    """Images of a source as tensors, with their label maps; a small dataset is cached in memory."""

    def __init__(
        self,
        source: Layout,
        transform: Callable[[Pixels, Labels], tuple[Tensor, Labels]],
        seed: int | None,
        config: SegmenterConfig,
        facts: Mapping[str, Any],
    ) -> None:
        self.source, self.transform, self.seed = source, transform, seed
        self.config, self.facts = config, facts
        self.notes: tuple[str, ...] = ()
        self.windows = windows_of(config) if facts.get("sliding") else None
        self.cached: dict[int, tuple[Pixels, Labels]] = {}

    def __str__(self) -> str:
        sliding = ", sliding windows" if self.facts.get("sliding") else ""
        scale = self.facts.get("scale", 1.0)
        sized = f" at {scale:g} times the size" if scale != 1 else ""
        return f"{self.config.data}, {self.facts['split']}{sized}{sliding}"

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, sample: Sample) -> Item:
        pair, is_broken = read_or_next(self._read, sample.image, len(self.source))
        if self.seed is None:
            return *self.transform(*pair), sample.image, is_broken
        with seeded(self.seed, sample.epoch, sample.position):
            return *self.transform(*pair), sample.image, is_broken

    def _read(self, index: int) -> tuple[Pixels, Labels]:
        """Returns an image and its label map as they are stored."""
        if index in self.cached:
            return self.cached[index]
        image, values = self.source.read(index)
        pair = _F.pil_to_tensor(image), torch.from_numpy(values)
        if sum(tensor.nbytes for tensor in pair) * len(self.source) < CACHE_BYTES:
            self.cached[index] = pair
        return pair

    def collate(self, items: Sequence[Item]) -> PixelBatch:
        """Returns a batch; images in it may differ in size."""
        images, labels, indices, broken = (list(column) for column in zip(*items, strict=True))
        lost = [index for index, is_lost in zip(indices, broken, strict=True) if is_lost]
        return PixelBatch(images, labels, indices, lost, self.windows)


class RandomCrops:
    """Resizes, crops and flips images with their label maps, and changes the colours of images."""

    def __init__(self, config: SegmenterConfig) -> None:
        self.config = config
        self.normalize = Normalize(config)
        fill: dict[Any, Any] = {
            tv_tensors.Image: [round(255 * mean) for mean in self.normalize.colours["mean"]],
            tv_tensors.Mask: IGNORED,
        }
        size = config.crop_height, config.crop_width
        transforms: list[Any] = [v2.RandomCrop(size, pad_if_needed=True, fill=fill)]
        if config.flip:
            transforms.append(v2.RandomHorizontalFlip(config.flip))
        if config.color_jitter:
            strength = config.color_jitter
            transforms.append(v2.ColorJitter(strength, strength, strength))
        self.transform = v2.Compose(transforms)

    def __call__(self, pixels: Pixels, labels: Labels) -> tuple[Tensor, Labels]:
        """Returns a crop of an image, normalized, and its label map."""
        low, high = self.config.min_resize, self.config.max_resize
        factor = low + (high - low) * float(torch.rand(()))
        size = resized(pixels.shape[-2:], self.config.short_side, factor)
        image: Any = tv_tensors.Image(_F.resize(pixels, list(size), antialias=True))
        mask: Any = _F.resize(tv_tensors.Mask(labels[None]), list(size))
        image, mask = self.transform(image, mask)
        return self.normalize(image.as_subclass(Tensor)), mask[0].as_subclass(Tensor)


class WholeImages:
    """Resizes images for evaluation; label maps stay as they are stored."""

    def __init__(self, config: SegmenterConfig, condition: Condition = AS_TRAINED) -> None:
        self.short_side, self.condition = config.short_side, condition
        self.normalize = Normalize(config)

    def __call__(self, pixels: Pixels, labels: Labels) -> tuple[Tensor, Labels]:
        """Returns an image, resized and normalized, and its label map."""
        size = resized(pixels.shape[-2:], self.short_side, self.condition.scale)
        image = self.normalize(_F.resize(pixels, list(size), antialias=True))
        if self.condition.size is None:
            return image, labels
        middle = list(self.condition.size)
        scaled = _F.resize(tv_tensors.Mask(labels[None]), list(size)).as_subclass(Tensor)
        padded = _F.center_crop(scaled + 1, middle) - 1  # so that padding is 255, which is ignored
        return _F.center_crop(image, middle), padded[0]


class Normalize:
    """Makes pixels of integers those that a model was made for."""

    def __init__(self, config: SegmenterConfig) -> None:
        self.colours = colours_of(config)

    def __call__(self, pixels: Pixels) -> Tensor:
        """Returns the normalized pixels."""
        values = _F.to_dtype(pixels, torch.float32, scale=True)
        return _F.normalize(values, self.colours["mean"], self.colours["std"])


def resized(size: Sequence[int], short_side: int, factor: float) -> tuple[int, int]:
    """Returns the rows and columns of an image after resizing."""
    factor *= short_side / min(size) if short_side else 1.0
    rows, columns = (max(1, round(side * factor)) for side in size)
    return rows, columns


def colours_of(config: SegmenterConfig) -> dict[str, Any]:
    """Returns the mean and the standard deviation of each colour, whose values are 0 to 1."""
    if config.model not in TRANSFORMERS_MODELS:
        return preparation_of(config.model)
    kind = config.backbone["model_type"] if config.model == "upernet" else config.model
    if kind == TIMM_BACKBONE:
        return preparation_of(config.backbone["backbone"], "backbone")
    if kind == "beit":  # whose weights are not for the colours of ImageNet
        return {"mean": [0.5] * 3, "std": [0.5] * 3}
    return {"mean": list(IMAGENET_DEFAULT_MEAN), "std": list(IMAGENET_DEFAULT_STD)}
