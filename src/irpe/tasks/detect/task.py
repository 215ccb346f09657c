"""Detection as a task of the training loop: its data, its loss and its score."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import DetrConfig

from irpe.adapters.equipped import table_names
from irpe.adapters.parameter_groups import group_parameters
from irpe.errors import UserError
from irpe.progress import NO_PROGRESS, Progress
from irpe.tasks.detect.annotations.source import BoxSource, open_boxes
from irpe.tasks.detect.backbone import PREFIX, FrozenBackbone, load_backbone
from irpe.tasks.detect.config import DetectorConfig
from irpe.tasks.detect.feature_cache import FeatureMaps, cached_features
from irpe.tasks.detect.loss import Normalizer, count_targets, detection_loss, make_normalizer
from irpe.tasks.detect.model import LayerPredictions, build_detector
from irpe.tasks.detect.scores import (
    BoxScore,
    Detection,
    gather_detections,
    score_boxes,
    to_detections,
)
from irpe.tasks.detect.views import BoxBatch, BoxImages, Views
from irpe.train.normalization import normalization
from irpe.train.sampling import every_batch
from irpe.train.weights import Weights

DetectorInputs = BoxImages | FeatureMaps
EVAL_BATCH = 4  # images per forward pass in evaluation
_STEP = 32  # between the short sides of training


@dataclass
class DetectionTask:
    """Detecting objects in images.

    Args:
        config: The configuration, with the classes of the data.
        train: The images to train on.
        val: The images to evaluate on.
        progress: Is told how the computation of feature maps goes.
        weights: Those of the checkpoint that the run resumes from, if there is one.
    """

    config: DetectorConfig
    train: BoxSource
    val: BoxSource
    progress: Progress = NO_PROGRESS
    weights: Weights | None = None

    def __post_init__(self) -> None:
        config = self.config
        arguments: dict[str, Any] = {**config.model_args, "num_labels": len(config.classes)}
        self.settings: Any = DetrConfig(**arguments)
        backbone = load_backbone(config, self.weights) if config.cached_versions else None
        self.images: DetectorInputs = _train_inputs(self.train, config, backbone, self.progress)
        self.val_images: DetectorInputs = eval_inputs(self.val, config, backbone, self.progress)

    @property
    def model_name(self) -> str:
        """DETR, and its backbone's name in timm."""
        return f"DETR on {self.config.backbone}"

    @property
    def notes(self) -> tuple[str, ...]:
        """How many invalid boxes were left out of each split."""
        splits = {self.config.train_split: self.train, self.config.val_split: self.val}
        return tuple(
            f"{split}: {source.num_dropped} invalid boxes are left out"
            for split, source in splits.items()
            if source.num_dropped
        )

    def check_micro_batch(self, size: int) -> None:
        """Takes any number of images."""

    def build(self) -> nn.Module:
        """Returns the model at its start, which takes feature maps where these are cached."""
        takes = "features" if self.config.cached_versions else "images"
        return build_detector(self.config, is_filled=self.weights is None, takes=takes)

    def training_module(self, model: nn.Module) -> nn.Module:
        """Returns a view of the model with the predictions of all layers."""
        return LayerPredictions(model)

    def optimizer_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameters with the learning rates of the backbone and of all else."""
        return detector_groups(model, self.config)

    def normalizer(self, batches: list[BoxBatch], accelerator: Accelerator) -> Normalizer:
        """Counts the boxes of the step, over all processes."""
        labels = [label for batch in batches for label in batch.labels]
        counts = count_targets(labels, self.settings.num_queries).to(accelerator.device)
        total: Any = accelerator.reduce(counts, "sum")
        micro_batches = len(batches) * accelerator.num_processes
        return make_normalizer(total.cpu(), micro_batches, self.settings.eos_coefficient)

    def loss(
        self, module: nn.Module, batch: BoxBatch, normalizer: Normalizer, device: torch.device
    ) -> Tensor:
        """Returns the loss of a micro-batch."""
        targets = [
            {"boxes": boxes.to(device), "class_labels": labels.to(device)}
            for boxes, labels in zip(batch.boxes, batch.labels, strict=True)
        ]
        logits, boxes = module(batch.inputs.to(device), batch.mask.to(device))
        return detection_loss(logits, boxes, targets, normalizer, self.settings)

    def broken(self, batch: BoxBatch) -> list[int]:
        """Returns nothing: an image that cannot be read is an error."""
        return []

    def check_broken(self, broken: set[int]) -> None:
        """Has nothing to check."""

    def files(self, batch: BoxBatch) -> list[str]:
        """Returns where a batch's images come from."""
        return [self.train.filename(index) for index in batch.indices]

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> BoxScore:
        """Returns the score of a model on the validation images."""
        categories, workers = self.val.categories, self.config.workers
        found = detect(model, self.val_images, categories, accelerator, workers)
        return score_boxes(self.val.content, found)

    def model_inputs(self, batch: BoxBatch, device: torch.device) -> dict[str, Tensor]:
        """Returns what a model is called with, by name, for a batch of validation images."""
        return {"pixel_values": batch.inputs.to(device), "pixel_mask": batch.mask.to(device)}


def open_task(
    config: DetectorConfig, progress: Progress = NO_PROGRESS, weights: Weights | None = None
) -> DetectionTask:
    """Returns the task of a configuration, with the data that it names.

    Args:
        config: The configuration.
        progress: Is told how the computation of feature maps goes.
        weights: Those of the checkpoint that the run resumes from, if there is one.
    """
    if config.data == "embedded":
        raise UserError("data is missing: a folder in the layout of COCO or Pascal VOC")
    train = open_boxes(config.data, config.train_split, config.classes or None, config.holdout)
    val = open_boxes(config.data, config.val_split, train.classes, config.holdout)
    if config.limit:
        train, val = train.first(config.limit), val.first(config.limit)
    config = config.replace(classes=tuple(train.classes))
    return DetectionTask(config, train, val, progress, weights)


def detector_groups(model: nn.Module, config: DetectorConfig) -> list[dict[str, Any]]:
    """Returns groups for an optimizer; backbone and tables have rates of their own."""
    tables = set(table_names(model))

    def settings(name: str, _: nn.Parameter) -> tuple[float, float]:
        if name in tables:
            return config.lr * config.table_lr, 0.0
        is_backbone = name.startswith(PREFIX)
        return config.backbone_lr if is_backbone else config.lr, config.weight_decay

    return group_parameters(model, settings)


def detect(
    model: nn.Module,
    images: DetectorInputs,
    categories: Sequence[int],
    accelerator: Accelerator,
    workers: int = 0,
    batch_size: int = EVAL_BATCH,
    progress: Progress = NO_PROGRESS,
) -> list[Detection]:
    """Returns what a model detects in all images; it is in eval mode afterwards.

    Args:
        model: The model, on the accelerator's device.
        images: The images or feature maps, as the model takes them.
        categories: The category id of each of its classes.
        accelerator: Knows the processes and the device.
        workers: Processes that load images.
        batch_size: Images per forward pass.
        progress: Is told how far it is.
    """
    device, source = accelerator.device, images.source
    ranks = accelerator.num_processes, accelerator.process_index
    found: list[Detection] = []
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        for batch in every_batch(images, batch_size, workers, *ranks, progress):
            output = model(pixel_values=batch.inputs.to(device), pixel_mask=batch.mask.to(device))
            found += to_detections(
                output.logits.float().cpu(),
                output.pred_boxes.float().cpu(),
                [source.image_id(index) for index in batch.indices],
                [source.size(index) for index in batch.indices],
                categories,
            )
    return gather_detections(found, accelerator)


def eval_inputs(
    source: BoxSource,
    config: DetectorConfig,
    backbone: FrozenBackbone | None,
    progress: Progress = NO_PROGRESS,
) -> DetectorInputs:
    """Returns what a detector is evaluated on.

    Args:
        source: The images.
        config: The configuration.
        backbone: Computes the feature maps to cache; `None` for images.
        progress: Is told how the computation of feature maps goes.
    """
    colours = _colours(config.backbone)
    views = Views((config.short_side,), config.long_side, 0.0, False, **colours)
    if backbone is None:
        return BoxImages(source, views, None)
    return cached_features(backbone, source, views, 1, None, progress)


def _colours(backbone: str) -> dict[str, Any]:
    return {name: tuple(each) for name, each in normalization(backbone, "backbone").items()}


def _train_inputs(
    source: BoxSource, config: DetectorConfig, backbone: FrozenBackbone | None, progress: Progress
) -> DetectorInputs:
    sides = (*range(config.min_short_side, config.short_side, _STEP), config.short_side)
    crops_images = config.random_crop and backbone is None
    colours = _colours(config.backbone)
    views = Views(sides, config.long_side, config.flip, crops_images, **colours)
    if backbone is None:
        return BoxImages(source, views, config.seed)
    return cached_features(
        backbone, source, views, config.cached_versions, config.seed, progress, config.random_crop
    )
