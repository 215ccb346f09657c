"""Segmentation as a task of the training loop: its data, its loss and its score."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torchvision.transforms.v2.functional import center_crop

from irpe.errors import UserError
from irpe.progress import NO_PROGRESS, Progress
from irpe.tasks.segment.config import BACKBONE, HEADS, TRANSFORMERS_MODELS, SegmenterConfig
from irpe.tasks.segment.crops import PixelBatch, PixelImages, RandomCrops, WholeImages
from irpe.tasks.segment.labels.source import LabelledPixels, open_pixels
from irpe.tasks.segment.loss import count_pixels, pixel_loss
from irpe.tasks.segment.model import build_segmenter
from irpe.tasks.segment.scores import PixelScore, evaluate
from irpe.tasks.segment.windows import windows_of
from irpe.train.config import EMBEDDED
from irpe.train.optim import encoder_groups
from irpe.train.weights import Weights


@dataclass
class SegmentationTask:
    """Predicting the class of each pixel.

    Args:
        config: The configuration, with the classes of the data.
        train: The images to train on.
        val: The images to evaluate on.
        weights: Those of the checkpoint that the run resumes from, if there is one.
    """

    config: SegmenterConfig
    train: LabelledPixels
    val: LabelledPixels
    weights: Weights | None = None

    def __post_init__(self) -> None:
        self.config = self.config.replace(classes=tuple(self.train.classes))
        self.images = PixelImages(self.train, RandomCrops(self.config), self.config.seed)
        self.val_images = PixelImages(self.val, WholeImages(self.config), None)

    @property
    def model_name(self) -> str:
        """The model's name, its arguments, and its head or its backbone."""
        arguments = {**self.config.model_args}
        backbone = arguments.pop(BACKBONE, None)
        words = [self.config.model, *_in_words(arguments)]
        if backbone is not None:
            sizes = {name: value for name, value in backbone.items() if name != "model_type"}
            words += ["over", backbone["model_type"], *_in_words(sizes)]
        elif self.config.model not in TRANSFORMERS_MODELS:
            words.append(f"with a head that is {self.config.head or HEADS[0]}")
        return " ".join(words)

    @property
    def notes(self) -> tuple[str, ...]:
        """Nothing about the data needs to be said."""
        return ()

    def check_micro_batch(self, size: int) -> None:
        """Raises an error if upernet cannot normalize over the images of a forward pass."""
        if size < 2 and self.config.model == "upernet":
            raise UserError(
                f"{size} image per forward pass and device: upernet averages each image to one "
                "pixel and normalizes it over the images, choose 2 or more"
            )

    def build(self) -> nn.Module:
        """Returns the model at its start."""
        return build_segmenter(self.config, is_filled=self.weights is None)

    def training_module(self, model: nn.Module) -> nn.Module:
        """Returns the model itself: its output is what the loss needs."""
        return model

    def optimizer_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameters with the learning rates of tables, positions and all else."""
        return encoder_groups(model, self.config, self.config.absolute_lr)

    def normalizer(self, batches: list[PixelBatch], accelerator: Accelerator) -> float:
        """Returns the pixels with a class in the step, over all processes, per micro-batch."""
        own = sum(count_pixels(batch.labels) for batch in batches)
        counted = torch.tensor(own, dtype=torch.float64, device=accelerator.device)
        total: Any = accelerator.reduce(counted, "sum")
        return max(float(total), 1.0) / (len(batches) * accelerator.num_processes)

    def loss(
        self, module: nn.Module, batch: PixelBatch, normalizer: float, device: torch.device
    ) -> Tensor:
        """Returns the loss of a micro-batch."""
        images, labels = (torch.stack(each).to(device) for each in (batch.images, batch.labels))
        return pixel_loss(module(images), labels, normalizer)

    def broken(self, batch: PixelBatch) -> list[int]:
        """Returns nothing: an image that cannot be read is an error."""
        return []

    def check_broken(self, broken: set[int]) -> None:
        """Has nothing to check."""

    def files(self, batch: PixelBatch) -> list[str]:
        """Returns where a batch's images come from."""
        return [self.train.filename(index) for index in batch.indices]

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> PixelScore:
        """Returns the score of a model on the validation images."""
        windows, workers = windows_of(self.config), self.config.workers
        return evaluate(model, self.val_images, accelerator, windows, workers=workers)

    def model_inputs(self, batch: PixelBatch, device: torch.device) -> dict[str, Tensor]:
        """Returns what a model is called with, by name: the middle of some validation images."""
        size = [self.config.crop_height, self.config.crop_width]
        return {"images": torch.stack([center_crop(x, size) for x in batch.images]).to(device)}


def _in_words(arguments: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in arguments.items()]


def open_task(
    config: SegmenterConfig, progress: Progress = NO_PROGRESS, weights: Weights | None = None
) -> SegmentationTask:
    """Returns the task of a configuration, with the data that it names.

    Args:
        config: The configuration.
        progress: Is told how the check of the label maps goes.
        weights: Those of the checkpoint that the run resumes from, in place of the initial ones.
    """
    train = open_split(config, config.train_split, progress)
    config = config.replace(classes=tuple(train.classes))
    return SegmentationTask(config, train, open_split(config, config.val_split, progress), weights)


def open_split(
    config: SegmenterConfig, split: str, progress: Progress = NO_PROGRESS
) -> LabelledPixels:
    """Returns the images of a split of a configuration's data.

    Args:
        config: The configuration, with the classes if they are known.
        split: The split.
        progress: Is told how the check of the label maps goes.
    """
    if config.data == EMBEDDED:
        raise UserError("data is missing: a folder of images with label maps")
    names = config.ignore_label, config.class_names, config.classes
    source = open_pixels(config.data, split, *names, config.holdout, progress)
    return source.first(config.limit) if config.limit else source
