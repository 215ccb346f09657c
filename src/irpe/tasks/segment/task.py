"""Segmentation: images with label maps, a segmenter, cross-entropy by pixel, mIoU."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from irpe.core.colours import class_colours
from irpe.errors import UserError
from irpe.extras import require
from irpe.progress import Listener, silent
from irpe.tasks.segment.config import TRANSFORMERS_MODELS, SegmenterConfig
from irpe.tasks.segment.crops import PixelBatch, PixelImages, RandomCrops, WholeImages
from irpe.tasks.segment.labels import IGNORED, Layout, open_pixels
from irpe.tasks.segment.scores import (
    MEASURES,
    ClassCounts,
    count_classes,
    count_pixels,
    pixel_loss,
    score_pixels,
)
from irpe.tasks.segment.windows import class_scores
from irpe.train.config import EMBEDDED, RunConfig
from irpe.train.images import beside
from irpe.train.optim import encoder_groups
from irpe.train.task import AS_TRAINED, Condition, Images, Measure, Score, Split

_GREY = (90, 90, 90)  # of pixels without a class
_LARGEST = 16.0  # times the size in training


class LabelMap(NamedTuple):
    """What a model says of an image.

    Args:
        counts: Its pixels, by true and predicted class.
        size: Its rows and columns.
        packed: The predicted classes, compressed: there may be thousands of images.
    """

    counts: ClassCounts
    size: tuple[int, int]
    packed: bytes

    @property
    def labels(self) -> Any:
        """The class of each pixel."""
        return np.frombuffer(zlib.decompress(self.packed), np.uint8).reshape(self.size)


class SegmentationTask:
    """Predicting the class of each pixel."""

    Config: ClassVar[type[RunConfig]] = SegmenterConfig
    measures: ClassVar[tuple[Measure, ...]] = MEASURES
    takes: ClassVar[tuple[str, ...]] = ("size", "scale", "windows")
    eval_batch: ClassVar[int] = 8

    def __init__(self, config: SegmenterConfig, weights: dict[str, Tensor] | None = None) -> None:
        self.config, self.weights = config, weights
        self.sources: dict[str, Layout] = {}

    def open(
        self, split: Split, condition: Condition | None = AS_TRAINED, listen: Listener = silent
    ) -> PixelImages:
        """Returns the images of a split; opening those to train on fills in the classes."""
        name = self.config.train_split if split == "train" else self.config.val_split
        if name not in self.sources:
            self.sources[name] = self._read(name, listen)
        source, config = self.sources[name], self.config
        config.check_classes(source.classes)
        if not config.classes:
            self.config = config = config.replace(classes=tuple(source.classes))
        if condition is None:
            return PixelImages(source, RandomCrops(config), config.seed, config, {"split": name})
        condition.check(self)
        if not 0 < condition.scale <= _LARGEST:
            raise UserError(
                f"scale = {condition.scale} must be greater than 0, and at most {_LARGEST:g}"
            )
        sliding = config.sliding if condition.windows is None else condition.windows
        facts = {"split": name, "scale": condition.scale, "sliding": sliding}
        return PixelImages(source, WholeImages(config, condition), None, config, facts)

    def _read(self, split: str, listen: Listener) -> Layout:
        config = self.config
        if config.data == EMBEDDED:
            raise UserError("--data is missing: a folder of images with label maps")
        names = config.ignore_label, config.class_names, config.classes
        source = open_pixels(config.data, split, *names, config.holdout, listen)
        return source.first(config.limit) if config.limit else source

    def build(self, size: tuple[int, int] | None = None) -> nn.Module:
        """Returns the model at its start, which takes images of any size."""
        return build_segmenter(self.config, is_filled=self.weights is None)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameters with the learning rates of tables, positions and all else."""
        return encoder_groups(model, self.config, self.config.absolute_lr)

    def losses(
        self, model: nn.Module, batches: Sequence[PixelBatch], accelerator: Accelerator
    ) -> Iterator[Tensor]:
        """Yields the loss of each micro-batch, divided by the pixels of the step with a class."""
        own = sum(count_pixels(batch.labels) for batch in batches)
        counted = torch.tensor(own, dtype=torch.float64, device=accelerator.device)
        total: Any = accelerator.reduce(counted, "sum")
        normalizer = max(float(total), 1.0) / (len(batches) * accelerator.num_processes)
        for batch in batches:
            both = batch.images, batch.labels
            images, labels = (torch.stack(each).to(accelerator.device) for each in both)
            yield pixel_loss(model(images), labels, normalizer)

    def predict(self, model: nn.Module, batch: PixelBatch, device: torch.device) -> list[LabelMap]:
        """Returns the class of each pixel, in the size of the label maps.

        Images of one size share a forward pass.
        """
        images = batch.images
        is_one_size = len({image.shape for image in images}) == 1
        stacks = [torch.stack(images)] if is_one_size else [image[None] for image in images]
        scores = [s for x in stacks for s in class_scores(model, x.to(device), batch.windows)]
        count, found = len(self.config.classes), list[LabelMap]()
        for of_image, labels in zip(scores, batch.labels, strict=True):
            size = (labels.shape[0], labels.shape[1])
            if of_image.shape[-2:] != labels.shape:
                of_image = functional.interpolate(of_image[None], size=size, mode="bilinear")[0]
            predicted = of_image.argmax(0).to(torch.uint8).cpu()
            counts = count_classes(labels, predicted, count)
            found.append(LabelMap(counts, size, zlib.compress(predicted.numpy().tobytes(), 1)))
        return found

    def score(self, images: Images, predictions: Mapping[int, LabelMap]) -> Score:
        """Returns mIoU and accuracies."""
        return score_pixels([each.counts for each in predictions.values()], self.config.classes)

    def draw(
        self,
        images: Images,
        index: int,
        prediction: LabelMap,
        threshold: float | None = None,
    ) -> Any:
        """Returns an image beside its true and its predicted classes; without one: grey."""
        image, truth = images.source.read(index)
        palette = np.full((256, 3), _GREY, np.uint8)
        palette[: len(self.config.classes)] = class_colours(len(self.config.classes))
        predicted = np.where(truth == IGNORED, IGNORED, prediction.labels)
        maps = [Image.fromarray(palette[labels]) for labels in (truth, predicted)]
        return beside([image, *maps], ["image", "truth", "prediction"])


def build_segmenter(config: SegmenterConfig, is_filled: bool = True) -> nn.Module:
    """Returns the model to train; its random start follows from torch's random state."""
    if config.model in TRANSFORMERS_MODELS:
        require("transformers", "transformers")
        from irpe.tasks.segment.transformers_segmenter import build_transformers_segmenter

        return build_transformers_segmenter(config, is_filled)
    from irpe.tasks.segment.timm_segmenter import build_timm_segmenter

    return build_timm_segmenter(config, is_filled)
