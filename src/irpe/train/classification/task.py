"""Classification as a task of the training loop: its data, its loss and its score."""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from timm.data.mixup import Mixup
from timm.loss.cross_entropy import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from irpe.train.classification.model import build_model
from irpe.train.classification.scores import check_broken, evaluate
from irpe.train.classification.sources import Source
from irpe.train.config import ClassifierConfig
from irpe.train.sampling import Batch, Images, eval_images, train_images


@dataclass
class Classification:
    """Classifiers of images.

    Args:
        config: The configuration.
        train: The images to train on.
        val: The images to evaluate on.
    """

    config: ClassifierConfig
    train: Source
    val: Source

    def __post_init__(self) -> None:
        config = self.config
        self.images: Images = train_images(self.train, config)
        self.val_images: Images = eval_images(self.val, config)
        self.mixup: Any = None
        self.criterion: nn.Module = LabelSmoothingCrossEntropy(config.label_smoothing)
        if config.mixup or config.cutmix:
            smoothing, count = config.label_smoothing, len(self.train.classes)
            self.mixup = Mixup(
                config.mixup, config.cutmix, label_smoothing=smoothing, num_classes=count
            )
            self.criterion = SoftTargetCrossEntropy()

    def check_batch(self, size: int) -> None:
        """Raises an error if images cannot be paired."""
        if size % 2 and self.mixup is not None:
            raise ValueError(
                f"mixup and cutmix pair images: {size} at a time on a device must be even"
            )

    def build(self) -> nn.Module:
        """Returns the model at its start."""
        return build_model(self.config, len(self.train.classes))

    def groups(self, model: nn.Module) -> nn.Module:
        """Returns the model: timm tells which of its parameters decay."""
        return model

    def begin_step(self, batches: list[Batch], accelerator: Accelerator) -> None:
        """Needs nothing."""

    def loss(self, model: nn.Module, batch: Batch, device: torch.device) -> Tensor:
        """Returns the mean loss of a batch."""
        images, labels = batch.images.to(device), batch.labels.to(device)
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
        return self.criterion(model(images).float(), labels)

    def broken(self, batch: Batch) -> list[int]:
        """Returns the numbers of a batch's images that could not be read."""
        return batch.indices[batch.broken].tolist()

    def check_broken(self, broken: set[int]) -> None:
        """Raises an error if too many images could not be read so far."""
        if len(broken) > self.config.max_broken * len(self.train):
            files = ", ".join(self.train.filename(index) for index in sorted(broken)[:8])
            raise ValueError(
                f"{len(broken)} of {len(self.train)} images cannot be read, more than "
                f"max_broken = {self.config.max_broken}: {files}"
            )

    def files(self, batch: Batch) -> list[str]:
        """Returns where a batch's images come from."""
        return [self.train.filename(index) for index in batch.indices.tolist()]

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Returns the numbers of a row of the run's table."""
        score = evaluate(model, self.val_images, accelerator, workers=self.config.workers)
        check_broken(score, self.config.max_broken, "val")
        return {
            "val_loss": score.loss,
            "top1": score.top1,
            "top5": score.top5,
            "val_broken": score.num_broken,
        }
