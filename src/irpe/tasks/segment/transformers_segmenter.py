"""transformers' Segformer and UperNet: networks with heads of their own, equipped.

UperNet stands on a backbone that its configuration names: one of transformers, or one of timm.
What a network does with an image is seen on torch's meta device, where nothing is computed.
"""

import itertools
import math
import operator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoBackbone,
    SegformerForSemanticSegmentation,
    UperNetForSemanticSegmentation,
)

from irpe.adapters.equip import equip
from irpe.errors import UserError, check_choice
from irpe.tasks.segment.config import BACKBONE, TIMM_BACKBONE, SegmenterConfig
from irpe.tasks.segment.crops import colours_of
from irpe.tasks.segment.pretrained import fill_pretrained, is_pretrained
from irpe.tasks.segment.windows import score_padded
from irpe.tasks.transformers_arguments import check_arguments, own_arguments
from irpe.train.run import read_weights, start_from

# Those that irpe.equip takes and that give feature maps of images of any size.
BACKBONES = (
    "beit", "dinov2", "dinov2_with_registers", "dinov3_vit", "pixio", "swin", "swinv2", "vitdet",
    TIMM_BACKBONE,
)  # fmt: skip
_CLASSES: dict[str, Any] = {
    "segformer": SegformerForSemanticSegmentation,
    "upernet": UperNetForSemanticSegmentation,
}
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
        config: The size and the colours of the images that it is trained on.

    Attributes:
        image_size: The rows and columns of these images, padded.
        pretrained_cfg: Their mean and deviation, where models of timm have them.
    """

    def __init__(self, model: nn.Module, stride: int, config: SegmenterConfig) -> None:
        super().__init__()
        self.model: Any = model
        self.stride, self.image_size = stride, _padded(config, stride)
        self.pretrained_cfg = colours_of(config)

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the parameters that do not decay."""
        names = (name for name, _ in self.named_parameters())
        return {name for name in names if name.split(".")[-1] in _VECTORS}

    def forward(
        self, images: Float[Tensor, "image channel row column"]
    ) -> Float[Tensor, "image class row column"]:
        """Returns the class scores of each pixel; images are padded to the stride inside."""
        return score_padded(images, self.stride, lambda x: self.model(pixel_values=x).logits)


def build_transformers_segmenter(config: SegmenterConfig, is_filled: bool) -> TransformersSegmenter:
    """Returns a Segformer or an UperNet, equipped.

    Parameters that do nothing, such as mask tokens, are not trained: several processes could not.
    """
    try:
        own = _own_config(config)
        stride, unused = _probe(config, own)
    except UserError:
        raise
    except _ERRORS as error:
        raise UserError(
            f"model {config.model!r} with model_args {dict(config.model_args)} does not score "
            f"images of any size: {error}; the backbones of upernet are {', '.join(BACKBONES)}, of "
            "timm those that take any size"
        ) from error
    network = _CLASSES[config.model](own)
    initial = config.initial if is_filled else None
    has_names = initial is not None and is_pretrained(initial)
    if initial is not None and has_names:
        fill_pretrained(network, initial)
    model = TransformersSegmenter(network, stride, config)
    for name in unused:
        network.get_parameter(name).requires_grad_(False)
    if (config.encoding, config.absolute) != ("none", "keep"):
        equip(network, config.encoding, absolute=config.absolute)
    if initial is not None and not has_names:
        start_from(model, read_weights(Path(initial)), initial, _LAST_LAYER)
    return model


def _own_config(config: SegmenterConfig) -> Any:
    """Returns the configuration of transformers; UperNet has four feature maps by default."""
    made: Any = _CLASSES[config.model].config_class
    arguments: dict[str, Any] = dict(config.model_args)
    names = dict(enumerate(config.classes))
    labels = {"id2label": names, "label2id": {name: label for label, name in names.items()}}
    if config.model == "segformer":
        check_arguments(arguments, made, "Segformer")
        arguments = {"drop_path_rate": config.drop_path, **labels, **arguments}
        return made(**arguments)
    auxiliary = {"use_auxiliary_head": False}  # it is there for a second loss alone
    check_arguments(arguments, made, "UperNet", auxiliary)
    kind = str(config.backbone["model_type"])
    check_choice("model_args: model_type", kind, BACKBONES)
    backbone = {name: value for name, value in config.backbone.items() if name != "model_type"}
    inside: Any = CONFIG_MAPPING[kind]
    check_arguments(backbone, inside, kind)
    if "drop_path_rate" in own_arguments(inside):
        backbone = {"drop_path_rate": config.drop_path, **backbone}
    elif config.drop_path:
        raise UserError(
            f"drop_path = {config.drop_path}: {kind} has no stochastic depth to set, use 0"
        )
    if not {"out_features", "out_indices"} & set(backbone):
        with torch.device("meta"):
            names_of_stages = AutoBackbone.from_config(inside(**backbone)).stage_names
        stages = [index for index, name in enumerate(names_of_stages) if name != "stem"]
        count = min(_LEVELS, len(stages))  # evenly spaced up to the last
        last = (round((level + 1) * len(stages) / count) - 1 for level in range(count))
        backbone["out_indices"] = [stages[index] for index in last]
    return made(**labels, **arguments | auxiliary | {BACKBONE: inside(**backbone)})


def _probe(config: SegmenterConfig, own: Any) -> tuple[int, list[str]]:
    """Returns the stride of a network, and the names of its parameters that do nothing."""
    with torch.device("meta"):
        network = _CLASSES[config.model](own)
    # Not by default: BEiT keeps index tensors for all its models, on the device by default.
    stride = _stride(network)
    rows, columns = _padded(config, stride)
    for size in ((rows, columns), (rows + stride, columns + 2 * stride)):
        network(pixel_values=torch.empty(2, 3, *size, device="meta")).logits.sum().backward()
    return stride, [name for name, each in network.named_parameters() if each.grad is None]


def _padded(config: SegmenterConfig, stride: int) -> tuple[int, int]:
    rows, columns = (-(-side // stride) * stride for side in config.input_shape[1:])
    return rows, columns


def _stride(network: Any) -> int:
    """Returns what the sides of an image have to be multiples of, for whole cells in every map."""
    sizes = network.config
    if isinstance(network, SegformerForSemanticSegmentation):
        sides = itertools.accumulate(sizes.strides, operator.mul)  # of a patch in each stage
        return math.lcm(*(a * b for a, b in zip(sides, sizes.sr_ratios, strict=True)))
    backbone = sizes.backbone_config
    if backbone.model_type == TIMM_BACKBONE:
        return max(network.backbone._backbone.feature_info.reduction())
    stages = getattr(backbone, "depths", [1])  # each but the first merges 2 x 2 patches
    return backbone.patch_size * 2 ** (len(stages) - 1)
