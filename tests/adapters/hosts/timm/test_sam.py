"""timm's SAM: windows and maps, and its own encoding computed by our tables."""

import pytest
import torch
from adapters.hosts.table import make_timm_sam as make_sam
from adapters.small_models import gradients, images, perturb

import irpe

SPEC = "product-contextual-qkv"
OWN = "cross-contextual-k@clip7"  # a table row for each of the offsets of a 4x8 grid


def own_vectors(model):
    return {name: p for name, p in model.named_parameters() if "rel_pos_" in name}


@pytest.mark.parametrize("text", [OWN, "cross-contextual-qkv@clip7+unshared", "cross-contextual-k"])
def test_converted_vectors_give_the_same_output(text):
    model, x = make_sam().double(), images(32, 64).double()
    expected = model(x).detach()
    irpe.equip(model, text, builtin_bias="convert")
    torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-8)
    assert not own_vectors(model)
    perturb(model.blocks[1].attn.rpe)
    assert (model(x) - expected).abs().max() > 1e-3


def test_converted_tables_get_the_gradients_of_the_vectors():
    plain, model, x = make_sam().double(), make_sam().double(), images(32, 64).double()
    expected = gradients(plain, x)
    actual = gradients(irpe.equip(model, OWN, builtin_bias="convert"), x)
    for layer, sizes in enumerate(((3, 3), (4, 8))):
        for axis, letter in enumerate("hw"):
            vectors = expected[f"blocks.{layer}.attn.rel_pos_{letter}"]
            table = actual[f"blocks.{layer}.attn.rpe.key_tables.{axis}"][0]
            far = sizes[axis] - 1
            rows = table[7 - far : 7 + far + 1] * vectors.shape[1] ** 0.5
            torch.testing.assert_close(rows, vectors, rtol=1e-6, atol=1e-8)


def test_some_layers_are_converted():
    model, x = make_sam(), images(32, 64)
    expected = model(x)
    irpe.equip(model, OWN, builtin_bias="convert", layers=[1])
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    assert list(own_vectors(model)) == ["blocks.0.attn.rel_pos_h", "blocks.0.attn.rel_pos_w"]


def test_converted_models_are_saved(tmp_path):
    model, x = perturb(irpe.equip(make_sam(), OWN, builtin_bias="convert")), images(32, 64)
    irpe.save_equipped(model, tmp_path / "model")
    assert torch.equal(irpe.load_equipped(tmp_path / "model")(x), model(x))
