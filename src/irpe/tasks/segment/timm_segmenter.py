"""A backbone of timm, equipped, with a head of ours on its tokens.

The backbone takes images of any size: the learned absolute encoding is resampled to the grid of
each image, and relative tables serve every grid as they are.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from timm.layers.norm import LayerNorm2d
from torch import Tensor, nn

from irpe.adapters.equip import equip
from irpe.adapters.hosts.timm.building import create_timm_model, takes_argument
from irpe.errors import UserError
from irpe.tasks.segment.config import SegmenterConfig
from irpe.tasks.segment.windows import score_padded
from irpe.train.run import HEADS, read_weights, start_from

_BACKBONE = "backbone."
_ANY_SIZE = "dynamic_img_size"  # timm's argument for images of any size


class TimmSegmenter(nn.Module):
    """A vision transformer that predicts a class for each pixel.

    Args:
        backbone: A model of timm without a last layer.
        head: Makes class scores of the feature map of its tokens.

    Attributes:
        stride: The side of a patch, or of what has become of several, in pixels.
        pretrained_cfg: timm's description of the backbone and its images.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone: Any = backbone
        self.head = head
        self.stride = int(self.backbone.feature_info[-1]["reduction"])
        self.pretrained_cfg: Any = self.backbone.pretrained_cfg

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the parameters that do not decay."""
        return {f"{_BACKBONE}{name}" for name in self.backbone.no_weight_decay()}

    def forward(
        self, images: Float[Tensor, "image channel row column"]
    ) -> Float[Tensor, "image class row column"]:
        """Returns the class scores of each pixel; images are padded to whole patches inside."""
        return score_padded(images, self.stride, self._score)

    def _score(self, images: Tensor) -> Tensor:
        (features,) = self.backbone.forward_intermediates(
            images, indices=1, norm=True, output_fmt="NCHW", intermediates_only=True
        )
        return self.head(features)


class UpsamplingHead(nn.Sequential):
    """Two convolutions, each followed by twice the resolution, then a class score for each place.

    Convolutions repeat the edge of the map: zeros around it would tell the absolute position.
    """

    def __init__(self, dim: int, num_classes: int) -> None:
        hidden = max(dim // 2, 1)
        super().__init__(
            *_upsample(dim, hidden), *_upsample(hidden, hidden), nn.Conv2d(hidden, num_classes, 1)
        )


def _upsample(dim: int, out_dim: int) -> list[nn.Module]:
    return [
        nn.Conv2d(dim, out_dim, 3, padding=1, padding_mode="replicate"),
        LayerNorm2d(out_dim),
        nn.GELU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    ]


def build_timm_segmenter(config: SegmenterConfig, is_filled: bool) -> TimmSegmenter:
    """Returns a backbone of timm with a head, equipped."""
    backbone = _build_backbone(config, is_filled and config.initial == "pretrained")
    dim, count = backbone.num_features, len(config.classes)
    head = UpsamplingHead(dim, count) if config.head == "upsampling" else nn.Conv2d(dim, count, 1)
    model = TimmSegmenter(backbone, head)
    for name, side in (("crop_height", config.crop_height), ("crop_width", config.crop_width)):
        if side % model.stride:
            near = max(side // model.stride, 1) * model.stride
            raise UserError(
                f"{name} = {side} is not a multiple of {model.stride}, the side of a patch of "
                f"{config.model}: choose {near} or {near + model.stride}"
            )
    if (config.encoding, config.absolute) != ("none", "keep"):
        equip(backbone, config.encoding, absolute=config.absolute)
    if is_filled and config.initial not in (None, "pretrained"):
        _fill(model, read_weights(Path(str(config.initial))), str(config.initial))
    return model


def _build_backbone(config: SegmenterConfig, is_pretrained: bool) -> Any:
    arguments: dict[str, Any] = {
        "img_size": (config.crop_height, config.crop_width),
        "num_classes": 0,
        "global_pool": "",  # so that the last norm is applied to every token
        "drop_path_rate": config.drop_path,
        _ANY_SIZE: True,
        **config.model_args,
    }
    try:
        backbone: Any = create_timm_model(config.model, arguments, is_pretrained)
    except ValueError as error:
        if takes_argument(config.model, **{_ANY_SIZE: True}):
            raise
        raise UserError(
            f"model {config.model!r} does not take images of any size on a grid: choose a ViT, "
            "DeiT, EVA or Swin of timm"
        ) from error
    if not hasattr(backbone, "forward_intermediates"):
        raise UserError(
            f"model {config.model!r} does not give its feature maps: choose a ViT, DeiT, EVA or "
            "Swin of timm"
        )
    return backbone


def _fill(model: TimmSegmenter, weights: dict[str, Tensor], name: str) -> None:
    """Fills a model with the weights of another segmenter, or of a classifier but for its head."""
    is_segmenter = any(key.startswith(_BACKBONE) for key in weights)
    own = {
        key.removeprefix(_BACKBONE): value
        for key, value in weights.items()
        if (key.startswith(_BACKBONE) if is_segmenter else key.split(".")[0] not in HEADS)
    }
    start_from(model.backbone, own, name)
    heads = {key: value for key, value in weights.items() if key.startswith("head.")}
    fitting = model.head.state_dict(prefix="head.")
    if is_segmenter and _shapes(heads) == _shapes(fitting):
        model.load_state_dict(heads, strict=False)


def _shapes(weights: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in weights.items()}
