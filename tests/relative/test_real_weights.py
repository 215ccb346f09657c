"""Trained weights, from the folder that the environment variable IRPE_TEST_WEIGHTS names."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from cli.terminal import irpe as command
from data import test_data
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import checkpoint_filter_fn

import irpe
from irpe.tasks.classify.sources import open_split

NAME = "vit_small_patch14_reg4_dinov2"
pytestmark = pytest.mark.filterwarnings("ignore:.*has no checksum")


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


def backbone(weights, size=70):
    model = timm.create_model(NAME, img_size=size, num_classes=0)
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


@pytest.fixture(scope="module")
def folder(weights, tmp_path_factory):
    """Twelve pictures of two classes, and the weights with a head for these."""
    folder, pixels = tmp_path_factory.mktemp("real"), np.random.default_rng(0)
    for index in range(12):
        path = folder / "data" / ("train", "val")[index % 2] / str(index // 6) / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.integers(0, 255, (56, 56, 3), np.uint8)).save(path)
    head = {"head.weight": torch.randn(2, 384), "head.bias": torch.zeros(2)}
    save_file({**weights, **head}, folder / "classifier.safetensors")
    return folder


def trained_from_file(*words, folder):
    settings = [
        "--data", "data", "--initial", Path(os.environ["IRPE_TEST_WEIGHTS"], f"{NAME}.safetensors"),
        "--set", f"model={NAME}", "--model-args", "{}", "--image-size", 56, "--epochs", 1,
        "--batch-size", 6, "--lr", 1e-9, "--set", "min_lr=0", "--set", "warmup_lr=0",
    ]  # fmt: skip
    done = command(*words, *settings, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done


def test_commands_start_from_a_backbone_of_timm_at_another_size(weights, folder):
    """At a rate of next to nothing, the models are those that timm makes of the file."""
    trained_from_file(
        "train", "laptop_64", "--encoding", "product-bias-k", "-o", "run", folder=folder
    )
    found = irpe.load_equipped(folder / "run" / "model").state_dict()
    expected = backbone(weights, 56).state_dict()
    assert expected["pos_embed"].shape[1] == 16
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
    rows = ["--row", "K=product-contextual-k,keep", "--row", "none=none,keep"]
    done = trained_from_file(
        "ablate", "--recipe", "laptop_64", *rows, "--seeds", 1, "--jobs", 1, "-o", "ablation",
        folder=folder,
    )  # fmt: skip
    assert "none" in done.stdout
    arguments = ("--model", NAME, "--image-size", 56, "--data", "data", "--json")
    done = command("eval", "classifier.safetensors", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_images"] == 6
