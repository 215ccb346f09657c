"""transformers' Segformer and UperNet: networks with heads of their own, equipped.

UperNet stands on a backbone that its configuration names: one of transformers, or one of timm.
What a network does with an image is seen on torch's meta device, where nothing is computed.
"""

import itertools
import math
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoBackbone,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

from irpe.adapters.equip import equip
from irpe.errors import UserError, check_choice
from irpe.tasks.segment.colours import colours_of
from irpe.tasks.segment.config import BACKBONE, TIMM_BACKBONE, SegmenterConfig
from irpe.tasks.segment.padding import score_padded
from irpe.tasks.segment.pretrained import fill_pretrained, is_pretrained
from irpe.train.transformers_arguments import check_arguments, own_arguments
from irpe.train.weights import read_weights, start_from

# Those that irpe.equip takes and that give feature maps of images of any size.
BACKBONES = (
    "beit", "dinov2", "dinov2_with_registers", "dinov3_vit", "pixio", "swin", "swinv2", "vitdet",
    TIMM_BACKBONE,
)  # fmt: skip
_CLASSES: dict[str, Any] = {
    "segformer": SegformerForSemanticSegmentation,
    "upernet": UperNetForSemanticSegmentation,
}
_NO_AUXILIARY = {"use_auxiliary_head": False}  # it is there for a second loss alone
_LAST_LAYER = ("model.decode_head.classifier",)
# Learned vectors that are no matrices of a layer: they do not decay.
_VECTORS = {
    "cls_token", "mask_token", "pos_embed", "position_embeddings", "register_tokens", "reg_token",
    "relative_position_bias_table",
}  # fmt: skip
_LEVELS = 4  # feature maps
_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError,
    StrictDataclassError, TypeError, ValueError,
)  # fmt: skip


class TransformersSegmenter(nn.Module):
    """A network of transformers that predicts a class for each pixel.

    Args:
        model: The network.
        stride: What the sides of an image have to be multiples of.
        crop: The rows and columns of the images that it is trained on.
        colours: The mean and deviation of these.

    Attributes:
        image_size: Those rows and columns, padded.
        pretrained_cfg: The colours, where models of timm have them.
    """

    def __init__(
        self,
        model: nn.Module,
        stride: int,
        crop: tuple[int, int],
        colours: Mapping[str, list[float]],
    ) -> None:
        super().__init__()
        self.model: Any = model
        self.stride, self.image_size = stride, _padded(crop, stride)
        self.pretrained_cfg = dict(colours)

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the parameters that do not decay."""
        names = (name for name, _ in self.named_parameters())
        return {name for name in names if name.split(".")[-1] in _VECTORS}

    def forward(
        self, images: Float[Tensor, "image channel row column"]
    ) -> Float[Tensor, "image class row column"]:
        """Returns the class scores of each pixel; images are padded to the stride inside."""
        return score_padded(images, self.stride, self._score)

    def _score(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def build_transformers_segmenter(config: SegmenterConfig, is_filled: bool) -> TransformersSegmenter:
    """Returns a Segformer or an UperNet, equipped.

    Parameters that do nothing, such as mask tokens, are not trained: several processes could not.

    Args:
        config: The configuration, with the classes of the data.
        is_filled: Fill it with the initial weights.
    """
    own = _own_config(config)
    stride, unused = _probe(config, own)
    network = _CLASSES[config.model](own)
    initial = config.initial if is_filled else None
    has_names = initial is not None and is_pretrained(initial)
    if initial is not None and has_names:
        fill_pretrained(network, initial)
    model = TransformersSegmenter(network, stride, config.input_shape[1:], colours_of(config))
    for name in unused:
        network.get_parameter(name).requires_grad_(False)
    if (config.encoding, config.absolute) != ("none", "keep"):
        equip(network, config.encoding, absolute=config.absolute)
    if initial is not None and not has_names:
        start_from(model, read_weights(Path(initial)), initial, _LAST_LAYER)
    return model


def _own_config(config: SegmenterConfig) -> Any:
    """Returns the configuration that transformers builds the network from."""
    names = dict(enumerate(config.classes))
    labels = {"id2label": names, "label2id": {name: label for label, name in names.items()}}
    arguments = dict(config.model_args)
    if config.model == "segformer":
        check_arguments(arguments, SegformerConfig, "Segformer")
        arguments.setdefault("drop_path_rate", config.drop_path)
        return _make(SegformerConfig, {**labels, **arguments}, config)
    check_arguments(arguments, UperNetConfig, "UperNet", _NO_AUXILIARY)
    arguments |= {BACKBONE: _backbone_config(config), **_NO_AUXILIARY}
    return _make(UperNetConfig, {**labels, **arguments}, config)


def _backbone_config(config: SegmenterConfig) -> Any:
    """Returns the configuration of UperNet's backbone, by default with four feature maps."""
    arguments = {name: value for name, value in config.backbone.items() if name != "model_type"}
    kind = str(config.backbone["model_type"])
    check_choice("model_args: model_type", kind, BACKBONES)
    config_class = CONFIG_MAPPING[kind]
    check_arguments(arguments, config_class, kind)
    if "drop_path_rate" in own_arguments(config_class):
        arguments.setdefault("drop_path_rate", config.drop_path)
    elif config.drop_path:
        raise UserError(
            f"drop_path = {config.drop_path}: {kind} has no stochastic depth to set, use 0"
        )
    if not {"out_features", "out_indices"} & set(arguments):
        arguments["out_indices"] = _spread(_stages(config_class, arguments, config))
    return _make(config_class, arguments, config)


def _make(config_class: Any, arguments: dict[str, Any], config: SegmenterConfig) -> Any:
    try:
        return config_class(**arguments)
    except _ERRORS as error:
        raise UserError(f"model_args {dict(config.model_args)}: {error}") from error


def _stages(config_class: Any, arguments: dict[str, Any], config: SegmenterConfig) -> list[str]:
    """Returns the names of a backbone's stages."""
    made = _make(config_class, arguments, config)
    try:
        with torch.device("meta"):
            return AutoBackbone.from_config(made).stage_names
    except _ERRORS as error:
        raise UserError(f"model_args {dict(config.model_args)}: {error}") from error


def _spread(stages: list[str]) -> list[int]:
    """Returns the indices of four stages, evenly spaced up to the last; all if there are fewer."""
    indices = [index for index, name in enumerate(stages) if name != "stem"]
    count = min(_LEVELS, len(indices))
    return [indices[round((level + 1) * len(indices) / count) - 1] for level in range(count)]


def _probe(config: SegmenterConfig, own: Any) -> tuple[int, list[str]]:
    """Returns the stride of a network, and the names of its parameters that do nothing."""
    try:
        with torch.device("meta"):
            network = _CLASSES[config.model](own)
        # Not by default: BEiT keeps index tensors for all its models, on the device by default.
        stride = _stride(network)
        rows, columns = _padded(config.input_shape[1:], stride)
        for size in ((rows, columns), (rows + stride, columns + 2 * stride)):
            images = torch.empty(2, 3, *size, device="meta")
            network(pixel_values=images).logits.sum().backward()
    except _ERRORS as error:
        raise UserError(
            f"model {config.model!r} with {dict(config.model_args)} does not score images of any "
            f"size: {error}; the backbones of upernet are {', '.join(BACKBONES)}, of timm those "
            "that take any size"
        ) from error
    return stride, [name for name, each in network.named_parameters() if each.grad is None]


def _padded(size: tuple[int, int], stride: int) -> tuple[int, int]:
    rows, columns = (-(-side // stride) * stride for side in size)
    return rows, columns


def _stride(network: Any) -> int:
    """Returns what the sides of an image have to be multiples of, for whole cells in every map."""
    sizes = network.config
    if isinstance(network, SegformerForSemanticSegmentation):
        sides = itertools.accumulate(sizes.strides, operator.mul)  # of a patch in each stage
        return math.lcm(*(a * b for a, b in zip(sides, sizes.sr_ratios, strict=True)))
    if sizes.backbone_config.model_type == TIMM_BACKBONE:
        return max(network.backbone._backbone.feature_info.reduction())
    stages = getattr(
        sizes.backbone_config, "depths", [1]
    )  # each but the first merges 2 x 2 patches
    return sizes.backbone_config.patch_size * 2 ** (len(stages) - 1)
