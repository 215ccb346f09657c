"""The mean and deviation of the images that the network of a segmenter was made for."""

from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from irpe.tasks.segment.config import TIMM_BACKBONE, TRANSFORMERS_MODELS, SegmenterConfig
from irpe.train.image_files import normalization

_GREY = {"mean": [0.5] * 3, "std": [0.5] * 3}
_OTHERS = {"beit": _GREY}  # whose weights are not for the colours of ImageNet


def colours_of(config: SegmenterConfig) -> dict[str, list[float]]:
    """Returns the mean and the standard deviation of each colour, whose values are 0 to 1."""
    if config.model not in TRANSFORMERS_MODELS:
        return normalization(config.model)
    kind = config.backbone["model_type"] if config.model == "upernet" else config.model
    if kind == TIMM_BACKBONE:
        return normalization(config.backbone["backbone"], "backbone")
    imagenet = {"mean": list(IMAGENET_DEFAULT_MEAN), "std": list(IMAGENET_DEFAULT_STD)}
    return _OTHERS.get(kind, imagenet)
