"""Trained weights, from the folder that the environment variable IRPE_TEST_WEIGHTS names."""

import os
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from data import test_data
from safetensors.torch import load_file
from timm.models.vision_transformer import checkpoint_filter_fn

import irpe
from irpe.tasks.classify.sources import open_split

NAME = "vit_small_patch14_reg4_dinov2"


@pytest.fixture(scope="module")
def weights():
    folder = os.environ.get("IRPE_TEST_WEIGHTS")
    if not folder:
        pytest.skip("needs trained weights: name their folder with IRPE_TEST_WEIGHTS")
    path = Path(folder, f"{NAME}.safetensors")
    if not path.is_file():
        pytest.skip(f"needs {path}")
    return {name: value.float() for name, value in load_file(path).items()}


@pytest.fixture(scope="module")
def images():
    source = open_split(str(test_data("tiny-imagenet-29")), "val")
    found = []
    for index in range(0, len(source), len(source) // 24):
        image = source.read(index)[0].convert("RGB").resize((70, 70))
        pixels = torch.from_numpy(np.array(image)) / 255
        found.append(((pixels - 0.45) / 0.225).permute(2, 0, 1))
    return torch.stack(found[:24])


def backbone(weights):
    model = timm.create_model(NAME, img_size=70, num_classes=0)
    model.load_state_dict(checkpoint_filter_fn(dict(weights), model))
    return model.eval()


@pytest.mark.parametrize("spec", ["product-bias-k+unshared", "product-contextual-k"])
def test_tables_bring_back_most_of_what_the_attention_lost(weights, images, spec):
    conversion = irpe.make_relative(backbone(weights), images, spec, newton_steps=0)
    before = sum(each.divergence_before for each in conversion.attentions)
    after = sum(each.divergence_after for each in conversion.attentions)
    assert before > 5
    assert after < before / 3
    assert conversion.before.cosine < 0.85
    assert conversion.after.cosine > 0.87


def test_position_is_read_from_features_with_an_absolute_encoding_alone(weights, images):
    model = backbone(weights)
    with_positions = irpe.position_probe(model, images)
    without = irpe.position_probe(irpe.equip(model, "none", absolute="none"), images)
    for each in with_positions.attentions[:8]:
        assert min(each.row, each.column) > 0.8
    for each in without.attentions[:2]:
        assert max(each.row, each.column) < 0.5
