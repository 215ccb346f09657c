"""Backbones as timm publishes them: no head, 16 bits, positions of another grid."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from timm.layers import resample_abs_pos_embed

from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.task import build_model

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2, "patch_size": 8}
BACKBONES = {
    "registers, no class position": ({"reg_tokens": 4, "no_embed_class": True}, 0),
    "class position": ({}, 1),
    "no class token": ({"class_token": False, "global_pool": "avg", "fc_norm": False}, 0),
}


@pytest.mark.filterwarnings("ignore:.*has no checksum")
@pytest.mark.parametrize("encoding", ["none", "product-contextual-k"])
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_of_another_size_is_a_start(name, encoding, tmp_path):
    arguments, prefix = BACKBONES[name]
    arguments = {**SIZES, **arguments}
    torch.manual_seed(1)
    backbone = timm.create_model("vit_tiny_patch16_224", img_size=56, num_classes=0, **arguments)
    weights = {key: value.half().contiguous() for key, value in backbone.state_dict().items()}
    save_file(weights, tmp_path / "backbone.safetensors")
    config = ClassifierConfig(
        model="vit_tiny_patch16_224",
        model_args=arguments,
        image_size=32,
        encoding=encoding,
        initial=str(tmp_path / "backbone.safetensors"),
    )
    found = build_model(config, 5).state_dict()
    resampled = resample_abs_pos_embed(
        weights["pos_embed"].float(), [4, 4], num_prefix_tokens=prefix
    )
    expected = {**weights, "pos_embed": resampled}
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value.float(), atol=1e-6, rtol=1e-6)
    assert all("head" in key or ".rpe." in key for key in set(found) - set(expected))
