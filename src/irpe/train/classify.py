"""Classification as a task of the training loop: its data, its loss and its score."""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from timm.data.mixup import Mixup
from timm.loss.cross_entropy import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn

from irpe.train.build import build_model
from irpe.train.config import TrainConfig
from irpe.train.evaluate import check_broken, evaluate
from irpe.train.images import Source
from irpe.train.loading import Batch, Images, eval_images, train_images


@dataclass
class Classification:
    """Classifiers of images.

    Args:
        config: The configuration.
        train: The images to train on.
        val: The images to evaluate on.
    """

    config: TrainConfig
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

    def build(self) -> nn.Module:
        """Returns the model at its start."""
        return build_model(self.config, len(self.train.classes))

    def loss(self, model: nn.Module, content: Any, device: torch.device) -> Tensor:
        """Returns the mean loss of a batch."""
        batch = Batch._make(content)
        images, labels = batch.images.to(device), batch.labels.to(device)
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
        return self.criterion(model(images).float(), labels)

    def broken(self, content: Any) -> list[int]:
        """Returns the numbers of a batch's images that could not be read."""
        batch = Batch._make(content)
        return batch.indices[batch.broken].tolist()

    def files(self, content: Any) -> list[str]:
        """Returns where a batch's images come from."""
        return [self.train.filename(index) for index in Batch._make(content).indices.tolist()]

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
