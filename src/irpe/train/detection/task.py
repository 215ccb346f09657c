"""Detection as a task of the training loop: its data, its loss and its score."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import timm
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import DetrConfig

from irpe.adapters.equip import table_names
from irpe.train.classification.model import Weights
from irpe.train.config import DetectorConfig
from irpe.train.detection.annotations.source import BoxSource, open_boxes
from irpe.train.detection.feature_cache import FeatureMaps, keep_features
from irpe.train.detection.loss import Share, count_targets, share_of
from irpe.train.detection.model import FrozenBackbone, build_detector, fill_backbone
from irpe.train.detection.scores import (
    BoxScore,
    Detection,
    gather_detections,
    score_boxes,
    to_detections,
)
from irpe.train.detection.views import BoxBatch, BoxImages, Views
from irpe.train.sampling import Track, every_batch, no_track

Boxed = BoxImages | FeatureMaps
BATCH = 4  # images at a time in evaluation
_STEP = 32  # between the short sides of training


@dataclass
class DetectionTask:
    """Finding objects in images.

    Args:
        config: The configuration, with the classes of the data.
        train: The images to train on.
        val: The images to evaluate on.
        track: Shows how far the making of feature maps is.
        weights: Those of the checkpoint that the run goes on from, if there is one.
    """

    config: DetectorConfig
    train: BoxSource
    val: BoxSource
    track: Track = no_track
    weights: Weights | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.share = Share(1.0, 1.0)
        self.settings = DetrConfig(**config.model_args)
        backbone = _make_backbone(config, self.weights) if config.views else None
        self.images: Boxed = _train_images(self.train, config, backbone, self.track)
        self.val_images: Boxed = eval_boxes(self.val, config, backbone, self.track)

    def check_batch(self, size: int) -> None:
        """Takes any number of images."""

    def build(self) -> nn.Module:
        """Returns the model at its start."""
        return build_detector(self.config, is_filled=self.weights is None)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameters with the learning rates of the backbone and of all else."""
        return parameter_groups(model, self.config)

    def begin_step(self, batches: list[BoxBatch], accelerator: Accelerator) -> None:
        """Counts the boxes of the step, over all processes."""
        labels = [label for batch in batches for label in batch.labels]
        counts = count_targets(labels, self.settings.num_queries).to(accelerator.device)
        total: Any = accelerator.reduce(counts, "sum")
        parts = len(batches) * accelerator.num_processes
        self.share = share_of(total.cpu(), parts, self.settings.eos_coefficient)

    def loss(self, model: nn.Module, batch: BoxBatch, device: torch.device) -> Tensor:
        """Returns the loss of a batch."""
        targets = [
            {"boxes": boxes.to(device), "class_labels": labels.to(device), "share": self.share}
            for boxes, labels in zip(batch.boxes, batch.labels, strict=True)
        ]
        pixels, mask = batch.pixels.to(device), batch.mask.to(device)
        return model(pixel_values=pixels, pixel_mask=mask, labels=targets).loss

    def broken(self, batch: BoxBatch) -> list[int]:
        """Returns nothing: an image that cannot be read is an error."""
        return []

    def check_broken(self, broken: set[int]) -> None:
        """Finds nothing to object to."""

    def files(self, batch: BoxBatch) -> list[str]:
        """Returns where a batch's images come from."""
        return [self.train.filename(number) for number in batch.numbers]

    def evaluate(self, model: nn.Module, accelerator: Accelerator) -> dict[str, float]:
        """Returns the numbers of a row of the run's table."""
        categories, workers = self.val.categories, self.config.workers
        found = find_boxes(model, self.val_images, categories, accelerator, workers)
        return as_row(score_boxes(self.val.content, found))


def open_detection(
    config: DetectorConfig, track: Track = no_track, weights: Weights | None = None
) -> DetectionTask:
    """Returns the task of a configuration, with the data that it names.

    Args:
        config: The configuration.
        track: Shows how far the making of feature maps is.
        weights: Those of the checkpoint that the run goes on from, if there is one.
    """
    if config.data == "embedded":
        raise ValueError("data is missing: a folder in the layout of COCO or Pascal VOC")
    train = open_boxes(config.data, config.train_split, config.classes or None)
    val = open_boxes(config.data, config.val_split, train.classes)
    if config.limit:
        train, val = train.first(config.limit), val.first(config.limit)
    return DetectionTask(config.replace(classes=tuple(train.classes)), train, val, track, weights)


def find_boxes(
    model: nn.Module,
    images: Boxed,
    categories: Sequence[int],
    accelerator: Accelerator,
    workers: int = 0,
    batch_size: int = BATCH,
    track: Track = no_track,
) -> list[Detection]:
    """Returns what a model finds in all images; it is in eval mode afterwards.

    Args:
        model: The model, on the accelerator's device.
        images: The images as it sees them.
        categories: The category id of each of its classes.
        accelerator: Tells which process this is.
        workers: Processes that read images.
        batch_size: Images at a time.
        track: Shows how far it is.
    """
    device, source = accelerator.device, images.source
    share = accelerator.num_processes, accelerator.process_index
    found: list[Detection] = []
    model.eval()
    with torch.no_grad(), accelerator.autocast():
        for batch in every_batch(images, batch_size, workers, *share, track):
            output = model(pixel_values=batch.pixels.to(device), pixel_mask=batch.mask.to(device))
            found += to_detections(
                output.logits.float().cpu(),
                output.pred_boxes.float().cpu(),
                [source.image_id(number) for number in batch.numbers],
                [source.size(number) for number in batch.numbers],
                categories,
            )
    return gather_detections(found, accelerator)


def as_row(score: BoxScore) -> dict[str, float]:
    """Returns a score by the names that tables show."""
    return {
        "AP": score.ap,
        "AP50": score.ap50,
        "AP75": score.ap75,
        "APs": score.ap_small,
        "APm": score.ap_medium,
        "APl": score.ap_large,
    }


def eval_boxes(
    source: BoxSource, config: DetectorConfig, backbone: Any, track: Track = no_track
) -> Boxed:
    """Returns images as they are evaluated on.

    Args:
        source: The images.
        config: The configuration.
        backbone: What makes feature maps that are kept, or `None` for pixels.
        track: Shows how far the making of feature maps is.
    """
    views = Views((config.short_side,), config.long_side, 0.0, False, **_colours(config))
    if backbone is None:
        return BoxImages(source, views, None)
    return keep_features(backbone, source, views, 1, None, track)


def parameter_groups(model: nn.Module, config: DetectorConfig) -> list[dict[str, Any]]:
    """Returns what an optimizer learns: the backbone at its own rate, all but tables with decay."""
    tables = set() if config.encoding == "none" else set(table_names(model))
    groups: dict[tuple[float, float], list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            lr = config.backbone_lr if name.startswith("model.backbone.") else config.lr
            groups[lr, config.weight_decay * (name not in tables)].append(parameter)
    return [
        {"params": chosen, "lr": lr, "weight_decay": decay}
        for (lr, decay), chosen in groups.items()
    ]


def _make_backbone(config: DetectorConfig, weights: Weights | None) -> FrozenBackbone:
    backbone = FrozenBackbone(config.backbone).eval()
    if weights is None:
        fill_backbone(backbone.model, config)
    else:
        place = "model.backbone."
        own = {k.removeprefix(place): v for k, v in weights.items() if k.startswith(place)}
        backbone.load_state_dict(own)
    return backbone


def _train_images(source: BoxSource, config: DetectorConfig, backbone: Any, track: Track) -> Boxed:
    sides = (*range(config.min_short_side, config.short_side, _STEP), config.short_side)
    is_cut = config.random_crop and backbone is not None  # feature maps, in the place of images
    crop = config.random_crop and not is_cut
    views = Views(sides, config.long_side, config.flip, crop, **_colours(config))
    if backbone is None:
        return BoxImages(source, views, config.seed)
    return keep_features(backbone, source, views, config.views, config.seed, track, is_cut)


def _colours(config: DetectorConfig) -> dict[str, Any]:
    """Returns the mean and deviation that the backbone is for."""
    try:
        network: Any = timm.get_pretrained_cfg(config.backbone)
    except RuntimeError:  # no such tag
        network = None
    if network is None:
        raise ValueError(f"backbone {config.backbone!r} is not one of timm's")
    return {"mean": network.mean, "std": network.std}
