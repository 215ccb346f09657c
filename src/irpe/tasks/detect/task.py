"""Detection: images with boxes, DETR, its loss, average precision."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torchvision.ops import box_convert
from torchvision.transforms.v2 import functional as F  # noqa: N812, its usual name
from torchvision.utils import draw_bounding_boxes
from transformers import DetrConfig

from irpe.adapters.equipped import table_names
from irpe.adapters.parameter_groups import group_parameters
from irpe.core.colours import class_colours
from irpe.errors import UserError
from irpe.progress import Listener, silent
from irpe.tasks.detect.backbone import PREFIX, load_backbone
from irpe.tasks.detect.boxes import BoxSource, open_boxes
from irpe.tasks.detect.config import DetectorConfig
from irpe.tasks.detect.feature_cache import cached_features
from irpe.tasks.detect.loss import count_targets, detection_loss, make_normalizer
from irpe.tasks.detect.model import build_detector, layer_predictions
from irpe.tasks.detect.scores import MEASURES, score_boxes, to_detections
from irpe.tasks.detect.views import BoxBatch, BoxImages, Views
from irpe.train.config import EMBEDDED, RunConfig
from irpe.train.images import enlarged, preparation_of
from irpe.train.task import AS_TRAINED, Condition, Images, Measure, Score, Split

_STEP = 32  # between the short sides of training
_LEAST = 0.3  # the least score of a box that is drawn


class Queries(NamedTuple):
    """What a DETR says of an image.

    Args:
        scores: The score of each query's best class other than "no object".
        classes: These classes.
        boxes: Centre x, centre y, width and height of each box, relative to the image.
        num_classes: How many classes the model has.
    """

    scores: Tensor
    classes: Tensor
    boxes: Tensor
    num_classes: int


class DetectionTask:
    """Detecting objects in images."""

    Config: ClassVar[type[RunConfig]] = DetectorConfig
    measures: ClassVar[tuple[Measure, ...]] = MEASURES
    takes: ClassVar[tuple[str, ...]] = ("threshold",)
    eval_batch: ClassVar[int] = 4

    def __init__(self, config: DetectorConfig, weights: dict[str, Tensor] | None = None) -> None:
        self.config, self.weights = config, weights
        self.opened: dict[Any, BoxImages] = {}

    @classmethod
    def adopt(cls, model: Any, path: Path) -> tuple[Self, nn.Module, str | None]:
        """Returns the task of a DETR that is not a run, the model, and what to say of it.

        A model without a name for each class has COCO's category ids as its classes, as those of
        the paper. Images are prepared as for the paper's.

        Args:
            model: The model.
            path: Where it was saved.
        """
        names = [model.config.id2label[number] for number in range(model.config.num_labels)]
        is_named = names[0] != "LABEL_0" and len(set(names)) == len(names)
        backbone = model.config.backbone_config.backbone
        classes = tuple(names) if is_named else ()
        return cls(DetectorConfig(backbone=backbone, classes=classes)), model, None

    def open(
        self, split: Split, condition: Condition | None = AS_TRAINED, listen: Listener = silent
    ) -> BoxImages:
        """Returns the images of a split, or their feature maps where these are cached."""
        if condition is not None:
            condition.check(self)
        key = split, condition is None
        if key not in self.opened:
            self.opened[key] = self._open(split, condition is None, listen)
        return self.opened[key]

    def _open(self, split: Split, is_training: bool, listen: Listener) -> BoxImages:
        config = self.config
        if config.data == EMBEDDED:
            raise UserError("--data is missing: a folder in the layout of COCO or Pascal VOC")
        name = config.train_split if split == "train" else config.val_split
        source = open_boxes(config.data, name, config.classes or None, config.holdout)
        source = source.subset(range(len(source))[: config.limit]) if config.limit else source
        if is_training and not config.classes:
            self.config = config = config.replace(classes=tuple(source.classes))
        colours = preparation_of(config.backbone, "backbone")
        mean, std = (tuple[Any, Any, Any](colours[each]) for each in ("mean", "std"))
        sides, flip, crops = (config.short_side,), 0.0, False
        if is_training:
            sides = (*range(config.min_short_side, config.short_side, _STEP), config.short_side)
            flip, crops = config.flip, config.random_crop and not config.cached_versions
        views = Views(sides, config.long_side, flip, crops, mean, std)
        seed = config.seed if is_training else None
        images = BoxImages(source, views, seed, (name, config.data))
        if not config.cached_versions:
            return images
        versions = config.cached_versions if is_training else 1
        crops = is_training and config.random_crop
        backbone = load_backbone(config, self.weights)
        return cached_features(backbone, images, versions, seed, listen, crops)

    def build(self, size: tuple[int, int] | None = None) -> nn.Module:
        """Returns the model at its start."""
        return build_detector(self.config, is_filled=self.weights is None)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameters with the learning rates of the backbone and of all else."""
        tables, config = set(table_names(model)), self.config

        def settings(name: str, _: nn.Parameter) -> tuple[float, float]:
            if name in tables:
                return config.lr * config.table_lr, 0.0
            is_backbone = name.startswith(PREFIX)
            return config.backbone_lr if is_backbone else config.lr, config.weight_decay

        return group_parameters(model, settings)

    def losses(
        self, model: nn.Module, batches: Sequence[BoxBatch], accelerator: Accelerator
    ) -> Iterator[Tensor]:
        """Yields the loss of each micro-batch, divided by the boxes of the step."""
        arguments: dict[str, Any] = {"num_labels": len(self.config.classes)}
        settings: Any = DetrConfig(**self.config.model_args, **arguments)
        labels = [label for batch in batches for label in batch.labels]
        counts = count_targets(labels, settings.num_queries).to(accelerator.device)
        total: Any = accelerator.reduce(counts, "sum")
        micro_batches = len(batches) * accelerator.num_processes
        normalizer = make_normalizer(total.cpu(), micro_batches, settings.eos_coefficient)
        device = accelerator.device
        self._feed(model)
        for batch in batches:
            targets = [
                {"boxes": boxes.to(device), "class_labels": classes.to(device)}
                for boxes, classes in zip(batch.boxes, batch.labels, strict=True)
            ]
            inputs, mask = batch.inputs.to(device), batch.mask.to(device)
            logits, boxes = layer_predictions(model, inputs, mask)
            yield detection_loss(logits, boxes, targets, normalizer, settings)

    def _feed(self, model: Any) -> None:
        """Tells the backbone that it gets feature maps where these are cached."""
        if self.config.cached_versions:
            model.model.backbone.takes = "features"

    def predict(self, model: nn.Module, batch: BoxBatch, device: torch.device) -> list[Queries]:
        """Returns the classes and boxes of all queries of each image."""
        self._feed(model)
        found = model(pixel_values=batch.inputs.to(device), pixel_mask=batch.mask.to(device))
        scores, classes = found.logits.float().cpu().softmax(-1)[..., :-1].max(-1)
        of_images = zip(scores, classes, found.pred_boxes.float().cpu(), strict=True)
        return [Queries(*each, found.logits.shape[-1] - 1) for each in of_images]

    def score(self, images: Images, predictions: Mapping[int, Queries]) -> Score:
        """Returns average precision."""
        source, content = images.source, images.source.content
        if len(predictions) < len(source):
            content = source.subset(list(predictions)).content
        found = [
            each
            for index, queries in predictions.items()
            for each in self._detections(source, index, queries)
        ]
        return score_boxes(content, found)

    def _detections(self, source: BoxSource, index: int, queries: Queries) -> list[dict[str, Any]]:
        """Returns what was detected in an image, of the categories of the data."""
        own = source.categories if self.config.classes else range(queries.num_classes)
        found = to_detections(*queries[:3], source.image_id(index), source.size(index), own)
        return [each for each in found if each["category_id"] in source.categories]

    def draw(
        self, images: Images, index: int, prediction: Queries, threshold: float | None = None
    ) -> Any:
        """Returns an image with the boxes found, their scores, and the true ones thin."""
        source = images.source
        picture, target = source.read(index)
        shown = enlarged(picture)
        factor = shown.width / picture.width
        pixels = F.pil_to_tensor(shown)
        names = dict(zip(source.categories, source.classes, strict=True))
        colours = dict(zip(source.classes, class_colours(len(source.classes)), strict=True))
        truth = [source.classes[label] for label in target.labels.tolist()]
        least = _LEAST if threshold is None else threshold
        detections = self._detections(source, index, prediction)
        found = sorted(
            (each for each in detections if each["score"] >= least), key=lambda each: each["score"]
        )
        labels = [names[each["category_id"]] for each in found]
        boxes = torch.tensor([each["bbox"] for each in found]).reshape(-1, 4)
        if len(target.boxes):
            lines: Any = [colours[name] for name in truth]
            pixels = draw_bounding_boxes(pixels, factor * target.boxes, colors=lines, width=1)
        if found:
            texts = [f"{n} {d['score']:.2f}" for n, d in zip(labels, found, strict=True)]
            lines = [colours[name] for name in labels]
            corners = factor * box_convert(boxes, "xywh", "xyxy")
            pixels = draw_bounding_boxes(pixels, corners, texts, lines, width=3)
        return F.to_pil_image(pixels)
