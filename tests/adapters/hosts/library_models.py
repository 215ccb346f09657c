"""Small models of transformers and torchvision with random weights, most on oblong grids."""

import torch
import transformers
from adapters import small_models
from adapters.hosts.timm.families import FIRST
from adapters.small_models import images, perturb
from torch import nn
from torchvision.models import SwinTransformer, VisionTransformer

import irpe
from irpe.adapters.equip import table_names

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 8}
WINDOW = 4


def make_pretrained(name, **arguments):
    """A classifier of transformers with patches of 8 x 8, in eval mode."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, "num_labels": 5, **arguments})
    return perturb(getattr(transformers, f"{name}ForImageClassification")(config).eval())


def make_vit(**arguments):
    return make_pretrained("ViT", **{"image_size": (16, 40), "intermediate_size": 48, **arguments})


def make_deit(**arguments):
    return make_pretrained("DeiT", **{"image_size": (16, 40), "intermediate_size": 48, **arguments})


def make_dinov2(**arguments):
    return make_pretrained("Dinov2", **{"image_size": 32, **arguments})


def make_dinov2_with_registers(**arguments):
    return make_pretrained("Dinov2WithRegisters", **{"image_size": 32, **arguments})


def make_swin(**arguments):
    """Swin of transformers: shifted windows of 4 x 4 on a grid of 8 x 16."""
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": WINDOW}
    config = transformers.SwinConfig(
        **{"image_size": (32, 64), "patch_size": 4, "num_labels": 5, **sizes, **arguments}
    )
    torch.manual_seed(0)
    return perturb(transformers.SwinForImageClassification(config).eval())


def make_detr(**arguments):
    """DETR with a tiny ResNet, whose feature map is 32 times smaller than the image."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8, 8, 16], depths=[1, 1, 1, 1], layer_type="basic",
        out_features=["stage4"],
    )  # fmt: skip
    sizes = {"d_model": 32, "num_queries": 5, "num_labels": 3}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 2, f"{side}_ffn_dim": 48}
    config = transformers.DetrConfig(**{**sizes, "backbone_config": backbone, **arguments})
    torch.manual_seed(0)
    model = perturb(transformers.DetrForObjectDetection(config).eval())
    with torch.no_grad():  # the features of a random ResNet are large: no attention would be soft
        model.model.input_projection.weight.mul_(0.02)
    return model


def make_segmenter():
    """DETR with a head for masks."""
    config = make_detr(encoder_attention_heads=8, decoder_attention_heads=8).config
    config.backbone_config.out_features = [f"stage{number}" for number in (1, 2, 3, 4)]
    torch.manual_seed(0)
    return perturb(transformers.DetrForSegmentation(config).eval())


def make_torchvision_vit(**arguments):
    sizes = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 32}
    torch.manual_seed(0)
    return perturb(VisionTransformer(**sizes, mlp_dim=48, num_classes=5, **arguments).eval())


def make_torchvision_swin(**arguments):
    """Swin of torchvision: shifted windows of 2 x 4."""
    sizes = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [2, WINDOW]}
    torch.manual_seed(0)
    model = SwinTransformer(**{"patch_size": [4, 4], "num_classes": 5, **sizes, **arguments})
    return perturb(model.eval())


def make_timm_vit(**arguments):
    return small_models.make_vit(**{"img_size": (16, 40), **arguments})


def make_timm_swin(**arguments):
    """Swin of timm: shifted windows of 2 x 4."""
    sizes = {"img_size": (32, 64), "window_size": (2, WINDOW)}
    return small_models.make_swin(**{**sizes, **arguments})


# How each is made, what it is called with, and the tokens before the patches.
HOSTS = {
    "ViT": (make_vit, images(16, 40), 1),
    "DeiT": (make_deit, images(16, 40), 2),
    "DINOv2": (make_dinov2, images(16, 40), 1),
    "DINOv2 with registers": (make_dinov2_with_registers, images(16, 40), 5),
    "Swin": (make_swin, images(32, 64), 0),
    "DETR": (make_detr, images(96, 160), 0),
    "torchvision's VisionTransformer": (make_torchvision_vit, images(), 1),
    "torchvision's SwinTransformer": (make_torchvision_swin, images(20, 60), 0),
    "timm's VisionTransformer": (make_timm_vit, images(16, 40), 1),
    "timm's SwinTransformer": (make_timm_swin, images(32, 64), 0),
}
PRETRAINED = {name: host for name, host in HOSTS.items() if "'s " not in name}  # transformers
IN_WINDOWS = {name: host for name, host in HOSTS.items() if "Swin" in name}
HOSTS |= FIRST


# What makes those smaller that take long to compile or export.
SMALLER = {
    "Swin": {"depths": [2], "num_heads": [2]},
    "DETR": {"encoder_layers": 1, "decoder_layers": 1},
    "torchvision's SwinTransformer": {"depths": [2], "num_heads": [2]},
    "timm's SwinTransformer": {"depths": (2,), "num_heads": (2,)},
}


class Outputs(nn.Module):
    """A model that returns one tensor: all that it predicts."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        out = self.model(x)
        if isinstance(out, torch.Tensor):
            return out
        if "logits" not in out:
            return out.last_hidden_state
        boxes = [out.pred_boxes] if "pred_boxes" in out else []
        return torch.cat([out.logits, *boxes], dim=-1)


def equipped(make, spec="product-contextual-qkv", **arguments):
    """An equipped model with random tables."""
    model = irpe.equip(make(), spec, **arguments)
    generator = torch.Generator().manual_seed(3)
    for name in table_names(model):
        torch.nn.init.normal_(model.get_parameter(name), std=0.5, generator=generator)
    return model


def predict(model, x):
    return Outputs(model)(x)
