"""Classification: images of classes, a vision transformer, cross-entropy, top-1."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import torch
from accelerate import Accelerator
from timm.data.mixup import Mixup
from timm.loss.cross_entropy import LabelSmoothingCrossEntropy, SoftTargetCrossEntropy
from torch import Tensor, nn
from torch.nn import functional

from irpe.adapters.equip import equip
from irpe.adapters.hosts.timm.building import create_timm_model, takes_argument
from irpe.errors import UserError
from irpe.progress import Listener, silent
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.sources import Source, open_source
from irpe.tasks.classify.transforms import Batch, LabelledImages, eval_images, train_images
from irpe.train.config import RunConfig
from irpe.train.images import write_below
from irpe.train.optim import encoder_groups
from irpe.train.run import read_weights, start_from
from irpe.train.task import AS_TRAINED, Condition, Images, Measure, Score, Split

_HEADS = ("head.bias", "head.fc.bias")
TOP = 5  # of the classes; of so many or fewer, every image's class is among them
_TOP1, _TOP5 = Measure("top1", "top-1", "%"), Measure("top5", "top-5", "%", brief=False)
_LOSS = Measure("val_loss", "loss", higher_is_better=False, digits=4)


class Guess(NamedTuple):
    """What a model says of an image.

    Args:
        classes: The classes with the highest scores, the best first.
        label: The class of the image.
        loss: The cross-entropy.
    """

    classes: tuple[int, ...]
    label: int
    loss: float


class ClassificationTask:
    """Classifying images."""

    Config: ClassVar[type[RunConfig]] = ClassifierConfig
    measures: ClassVar[tuple[Measure, ...]] = (_TOP1, _TOP5, _LOSS)
    takes: ClassVar[tuple[str, ...]] = ("size", "shift")
    eval_batch: ClassVar[int] = 256

    def __init__(
        self,
        config: ClassifierConfig,
        weights: dict[str, Tensor] | None = None,
        preparation: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config if weights is None else config.replace(initial=None)
        self.weights = weights
        self.preparation = preparation
        self.sources: dict[str, Source] = {}
        self.opened: dict[Any, LabelledImages] = {}

    @classmethod
    def adopt(cls, model: Any, path: Path) -> tuple[Self, nn.Module, str | None]:
        """Returns the task of a model that is not a run, the model, and what to say of it."""
        from irpe.tasks.classify.others import as_classifier

        found = as_classifier(model, path)
        return cls(found.config, preparation=found.preparation), found.model, found.note

    def open(
        self, split: Split, condition: Condition | None = AS_TRAINED, listen: Listener = silent
    ) -> LabelledImages:
        """Returns the images of a split; opening those to train on fills in the classes."""
        if split not in self.sources:
            self.sources[split] = open_source(self.config, split)
        source = self.sources[split]
        self.config.check_classes(source.classes)
        if not self.config.classes:
            self.config = self.config.replace(classes=tuple(source.classes))
        if condition is None:
            return train_images(source, self.config)
        condition.check(self)
        self._check(condition)
        key = split, condition.size
        if key not in self.opened:
            self.opened[key] = eval_images(source, self.config, self.preparation, condition.size)
        return self.opened[key].shifted(condition.shift * self.patch if condition.shift else 0)

    def _check(self, condition: Condition) -> None:
        """Raises an error for a size that is not whole patches, or a shift out of the image."""
        for side in condition.size or ():
            if side < self.patch or side % self.patch:
                near = max(1, side // self.patch) * self.patch
                raise UserError(
                    f"size {side} is not a multiple of {self.patch}, the side of a patch: choose "
                    f"{near} or {near + self.patch}"
                )
        most = self.config.image_size // self.patch - 1 if condition.shift else 0
        if not 0 <= condition.shift <= most:
            raise UserError(
                f"a shift by {condition.shift} patches leaves nothing of an image of "
                f"{self.config.image_size} pixels in view: choose 0 to {most}"
            )

    @cached_property
    def patch(self) -> int:
        """The side of a patch of timm's ViT or Swin, in pixels."""
        with torch.device("meta"):
            plain = self.config.replace(initial=None, encoding="none", builtin_bias="keep")
            model: Any = build_model(plain, len(self.config.classes))
        return model.patch_embed.patch_size[0]

    def build(self, size: tuple[int, int] | None = None) -> nn.Module:
        """Returns the model at its start."""
        count = len(self.config.classes)
        if not count and self.weights is not None:
            heads = [self.weights[name] for name in _HEADS if name in self.weights]
            count = len(heads[0]) if heads else 0
        return build_model(self.config, count, size)

    def groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Returns the parameters with the learning rates of tables, positions and all else."""
        return encoder_groups(model, self.config, self.config.absolute_lr)

    def losses(
        self, model: nn.Module, batches: Sequence[Batch], accelerator: Accelerator
    ) -> Iterator[Tensor]:
        """Yields the mean loss of each micro-batch."""
        config, mix = self.config, None
        criterion: nn.Module = LabelSmoothingCrossEntropy(config.label_smoothing)
        if config.mixup or config.cutmix:
            smoothing, count = config.label_smoothing, len(config.classes)
            mix = Mixup(config.mixup, config.cutmix, label_smoothing=smoothing, num_classes=count)
            criterion = SoftTargetCrossEntropy()
        for batch in batches:
            images, labels = (x.to(accelerator.device) for x in (batch.images, batch.labels))
            images, labels = mix(images, labels) if mix else (images, labels)
            yield criterion(model(images).float(), labels)

    def predict(self, model: nn.Module, batch: Batch, device: torch.device) -> list[Guess]:
        """Returns the best classes of each image, and its loss."""
        logits = model(batch.images.to(device)).float().cpu()
        if logits.shape[1] != len(self.config.classes):
            raise UserError(
                f"{self.config.data} has {len(self.config.classes)} classes, the model "
                f"{logits.shape[1]}"
            )
        ranked = logits.topk(min(TOP, logits.shape[1]), dim=1).indices.tolist()
        losses = functional.cross_entropy(logits, batch.labels, reduction="none").tolist()
        columns = zip(ranked, batch.labels.tolist(), losses, strict=True)
        return [Guess(tuple(classes), label, loss) for classes, label, loss in columns]

    def score(self, images: Images, predictions: Mapping[int, Guess]) -> Score:
        """Returns top-1, top-5 and loss."""
        found, classes = list(predictions.values()), images.source.classes
        values = tuple(100.0 * (each.classes[0] == each.label) for each in found)
        among = sum(each.label in each.classes for each in found)
        details = {
            "val_loss": sum(each.loss for each in found) / len(found),
            "top1": 100 * sum(each.classes[0] == each.label for each in found) / len(found),
            "top5": 100 * among / len(found),
        }
        most = Counter(each.label for each in found).most_common(1)[0][1]
        measures = self.measures if len(classes) > TOP else (_TOP1, _LOSS)
        return Score(measures, details, values, chance=100 * most / len(found))

    def draw(
        self, images: Images, index: int, prediction: Guess, threshold: float | None = None
    ) -> Any:
        """Returns an image with the best class below it, and the true one if it is another."""
        image, names = images.source.read(index)[0], images.source.classes
        best, truth = names[prediction.classes[0]], names[prediction.label]
        return write_below(image, best if best == truth else f"{best}, but it is {truth}")


def build_model(
    config: ClassifierConfig, num_classes: int, size: tuple[int, int] | None = None
) -> nn.Module:
    """Returns the model to train; its random start follows from torch's random state."""
    arguments: dict[str, Any] = {
        "img_size": config.image_size if size is None else size,
        "in_chans": config.channels,
        "num_classes": num_classes,
        "drop_path_rate": config.drop_path,
        **config.model_args,
    }
    try:
        model = create_timm_model(config.model, arguments, config.initial == "pretrained")
    except ValueError as error:
        if takes_argument(config.model, img_size=config.image_size):
            raise
        raise UserError(
            f"model {config.model!r} is not a vision transformer that is made for an image size: "
            "irpe models lists those that can be equipped"
        ) from error
    if (config.encoding, config.absolute, config.builtin_bias) != ("none", "keep", "keep"):
        equip(model, config.encoding, absolute=config.absolute, builtin_bias=config.builtin_bias)
    if config.initial is not None and config.initial != "pretrained":
        start_from(model, read_weights(Path(config.initial)), config.initial)
    return model
