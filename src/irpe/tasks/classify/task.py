"""Classification as a task of the training loop: its data, its loss and its score."""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from timm.data.mixup import Mixup
from timm.loss.cross_entropy import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from irpe.errors import UserError
from irpe.progress import NO_PROGRESS, Progress
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.model import build_model
from irpe.tasks.classify.scores import Score, check_broken, evaluate
from irpe.tasks.classify.sources import Source, open_images
from irpe.tasks.classify.transforms import Batch, LabelledImages, eval_images, train_images
from irpe.train.image_files import BrokenImageError, has_colours
from irpe.train.optim import encoder_groups
from irpe.train.weights import Weights


@dataclass
class ClassificationTask:
    """Classifying images.

    Args:
        config: The configuration; the classes of the data are filled in.
        train: The images to train on.
        val: The images to evaluate on.
    """

    config: ClassifierConfig
    train: Source
    val: Source

    def __post_init__(self) -> None:
        self.config.check_classes(self.train.classes)
        config = self.config.replace(classes=tuple(self.train.classes))
        self.config = config
        self.images: LabelledImages = train_images(self.train, config)
        self.val_images: LabelledImages = eval_images(self.val, config)
        self.mixup: Any = None
        self.criterion: nn.Module = LabelSmoothingCrossEntropy(config.label_smoothing)
        if config.mixup or config.cutmix:
            smoothing, count = config.label_smoothing, len(self.train.classes)
            self.mixup = Mixup(
                config.mixup, config.cutmix, label_smoothing=smoothing, num_classes=count
            )
            self.criterion = SoftTargetCrossEntropy()

    @property
    def model_name(self) -> str:
        """The model's name in timm, and its arguments."""
        arguments = (f"{name}={value}" for name, value in self.config.model_args.items())
        return " ".join([self.config.model, *arguments])

    @property
    def notes(self) -> tuple[str, ...]:
        """Says that colours are lost, where they are."""
        if self.config.channels == 3 or not any(map(self._has_colours, (0, len(self.train) // 2))):
            return ()
        return ("the images have colours, and are made grey: --channels 3 keeps the colours",)

    def _has_colours(self, index: int) -> bool:
        try:
            return has_colours(self.train.read(index)[0])
        except BrokenImageError:
            return False

    def check_micro_batch(self, size: int) -> None:
        """Raises an error if the images of a forward pass cannot be paired."""
        if size % 2 and self.mixup is not None:
            raise UserError(
                f"mixup and cutmix pair images: {size} per forward pass and device must be even"
            )

    def build(self) -> nn.Module:
        """Returns the model at its start."""
        return build_model(self.config, len(self.train.classes))

    def training_module(self, model: nn.Module) -> nn.Module:
        """Returns the model itself: its output is what the loss needs."""
        return model

    def optimizer_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameters with the learning rates of tables, positions and all else."""
        return encoder_groups(model, self.config, self.config.absolute_lr)

    def normalizer(self, batches: list[Batch], accelerator: Accelerator) -> None:
        """Returns nothing: the loss is the mean over the images of a micro-batch."""

    def loss(
        self, module: nn.Module, batch: Batch, normalizer: None, device: torch.device
    ) -> Tensor:
        """Returns the mean loss of a micro-batch."""
        images, labels = batch.images.to(device), batch.labels.to(device)
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
        return self.criterion(module(images).float(), labels)

    def broken(self, batch: Batch) -> list[int]:
        """Returns the indices of a batch's images that could not be read."""
        return batch.indices[batch.broken].tolist()

    def check_broken(self, broken: set[int]) -> None:
        """Raises an error if too many images could not be read so far."""
        if len(broken) > self.config.max_broken * len(self.train):
            files = ", ".join(self.train.filename(index) for index in sorted(broken)[:8])
            raise UserError(
                f"{len(broken)} of {len(self.train)} images cannot be read, more than "
                f"max_broken = {self.config.max_broken}: {files}"
            )

    def files(self, batch: Batch) -> list[str]:
        """Returns where a batch's images come from."""
        return [self.train.filename(index) for index in batch.indices.tolist()]

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> Score:
        """Returns the score of a model on the validation images."""
        score = evaluate(model, self.val_images, accelerator, workers=self.config.workers)
        check_broken(score, self.config.max_broken, self.val)
        return score

    def model_inputs(self, batch: Batch, device: torch.device) -> dict[str, Tensor]:
        """Returns what a model is called with, by name, for a batch of validation images."""
        return {"x": batch.images.to(device)}


def open_task(
    config: ClassifierConfig, progress: Progress = NO_PROGRESS, weights: Weights | None = None
) -> ClassificationTask:
    """Returns the task of a configuration, with the data that it names.

    Args:
        config: The configuration.
        progress: Is not needed: opening images takes no time.
        weights: Those of the checkpoint that the run resumes from, in place of the initial ones.
    """
    if weights is not None:
        config = config.replace(initial=None)
    return ClassificationTask(config, *open_images(config.data, config.root, config.holdout))
