"""Classifiers of any supported library, and how images are prepared for them.

A model of timm says how. Others do not keep it with their weights, except for the file that
transformers' image processors write; the defaults below are those of the published weights.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from timm.data.constants import (
    IMAGENET_DEFAULT_MEAN,
    IMAGENET_DEFAULT_STD,
    OPENAI_CLIP_MEAN,
    OPENAI_CLIP_STD,
)
from torch import Tensor, nn

from irpe.errors import UserError
from irpe.tasks.classify.config import ClassifierConfig
from irpe.train.images import colours_of_channels, preparation_of

_PROCESSOR = "preprocessor_config.json"  # which transformers' image processors write
_IMAGENET = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
_HALF = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
_CLIP = {"mean": OPENAI_CLIP_MEAN, "std": OPENAI_CLIP_STD}
_OF_FAMILIES = {"vit": _HALF, "siglip": _HALF, "clip": _CLIP, "metaclip_2": _CLIP}
_CROP = 0.875  # 224 of 256 pixels, as torchvision's weights


class Classifier(NamedTuple):
    """A model that returns a score for each class, and its images.

    Args:
        model: Takes images, returns logits; has `num_classes`.
        config: How images are prepared.
        preparation: Mean and deviation of the images, and what else timm's transforms take.
        is_known: Whether the model itself says how; else the user is told what is done.
    """

    model: nn.Module
    config: ClassifierConfig
    preparation: dict[str, Any]
    is_known: bool = False

    @property
    def note(self) -> str | None:
        """What the user should know, where the model does not say how images are prepared."""
        if self.is_known:
            return None
        mean, std = (self.preparation[name] for name in ("mean", "std"))
        return (
            f"images are prepared with {self.config.image_size} pixels, crop {self.config.crop}, "
            f"mean {mean}, std {std}: other preparation needs irpe's Python functions"
        )


class LogitsOf(nn.Module):
    """A classifier of transformers, which returns more than logits."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.num_classes: int = model.config.num_labels

    def forward(self, images: Tensor) -> Tensor:
        """Returns the logits of images."""
        return self.model(images).logits


def as_classifier(model: Any, path: Path) -> Classifier:
    """Returns a loaded model as a classifier."""
    name = type(model).__name__
    if getattr(model, "pretrained_cfg", None):
        return _of_timm(model)
    if hasattr(model, "config") and name.endswith("ForImageClassification"):
        return _of_transformers(model, path)
    if isinstance(getattr(model, "num_classes", None), int):
        size = getattr(model, "image_size", 224)
        config = ClassifierConfig(model=name, data="", image_size=size, channels=3, crop=_CROP)
        return Classifier(model, config, _IMAGENET)
    raise UserError(
        f"{path} holds a {name}, which is not an image classifier: irpe eval takes classifiers of "
        "timm, transformers (...ForImageClassification) and torchvision, and DETR"
    )


def _of_timm(model: Any) -> Classifier:
    own, embedding = model.pretrained_cfg, model.patch_embed
    tag, values = own.get("tag"), preparation_of(model)
    channels = embedding.proj.in_channels
    config = ClassifierConfig(
        model=own["architecture"] + (f".{tag}" if tag else ""),
        data="",
        image_size=_side(embedding.img_size),
        channels=channels,
        crop=values["crop_pct"],
    )
    colours = colours_of_channels(values, channels)
    chosen = {name: values[name] for name in ("interpolation", "crop_mode")}
    return Classifier(model, config, {**colours, **chosen}, is_known=True)


def _of_transformers(model: Any, path: Path) -> Classifier:
    own = model.config
    vision = getattr(own, "vision_config", own)  # CLIP and SigLIP have one for texts, too
    if not hasattr(vision, "image_size"):
        raise UserError(
            f"{path} holds a {type(model).__name__}, which has no image size (it takes patches): "
            "irpe eval takes models of square images; evaluate it with its own processor in Python"
        )
    config = ClassifierConfig(
        model=type(model).__name__,
        data="",
        image_size=_side(vision.image_size),
        channels=vision.num_channels,
        crop=1.0,
    )
    preparation = _read_processor(path) or _OF_FAMILIES.get(own.model_type, _IMAGENET)
    return Classifier(LogitsOf(model), config, preparation)


def _side(size: Any) -> int:
    """Returns the side of a square."""
    sides: tuple[int, ...] = (size,) if isinstance(size, int) else tuple(size)
    if len(set(sides)) > 1:
        raise UserError(f"the model takes images of {sides} pixels; irpe eval crops squares")
    return sides[0]


def _read_processor(path: Path) -> dict[str, tuple[float, ...]] | None:
    """Returns the mean and deviation that an image processor of transformers saved, if one did."""
    file = path / _PROCESSOR
    if not file.is_file():
        return None
    try:
        content = json.loads(file.read_text())
        return {name: tuple(map(float, content[f"image_{name}"])) for name in ("mean", "std")}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is damaged: it has no image_mean and image_std") from error
