"""timm's SAM: windows and maps, and its own encoding computed by our tables."""

import pytest
import torch
from adapters.hosts.timm.families import make_sam
from adapters.small_models import gradients, images, perturb, state_of

import irpe
from irpe.core.sinusoid import sinusoid

SPEC = "product-contextual-qkv"
OWN = "cross-contextual-k@clip7"  # a table row for each of the offsets of a 4x8 grid


def own_vectors(model):
    return {name: p for name, p in model.named_parameters() if "rel_pos_" in name}


def test_grids_are_those_of_windows_and_of_the_map():
    model = irpe.equip(make_sam(), SPEC)
    assert [a.grid for a in irpe.summary(model).attentions] == [(3, 3), (4, 8)]
    model(images(48, 24))
    assert [a.grid for a in irpe.summary(model).attentions] == [(3, 3), (6, 3)]


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


def test_dropped_vectors_are_vectors_of_zero():
    model, plain, x = irpe.equip(make_sam(), SPEC, builtin_bias="drop"), make_sam(), images(32, 64)
    before = plain(x)
    with torch.no_grad():
        for vectors in own_vectors(plain).values():
            vectors.zero_()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    assert (model(x) - before).abs().max() > 1e-3
    assert not own_vectors(model)


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


@pytest.mark.parametrize("absolute", ["none", "sinusoid"])
def test_absolute_encodings_are_replaced(absolute):
    model, plain = make_sam(use_abs_pos=True), make_sam(use_abs_pos=True)
    x = images(32, 64)
    with torch.no_grad():
        plain.pos_embed.zero_()
        if absolute == "sinusoid":
            plain.pos_embed[0] = sinusoid((4, 8), 32).view(4, 8, 32)
    irpe.equip(model, SPEC, absolute=absolute)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    assert "pos_embed" not in model.state_dict()


WRONG = [
    ({"builtin_bias": "convert"}, "cannot hold the host's own encoding"),
    ({"builtin_bias": "convert", "spec": "cross-contextual-k@clip6"}, "contextual-k@clip7'"),
    ({"grid": (4, 8)}, "Attention works on windows or maps"),
    ({"num_prefix_tokens": 1}, "Attention works on windows or maps"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG)
def test_what_sam_cannot_have_leaves_it_unchanged(arguments, message):
    model = make_sam()
    before, expected = state_of(model), model(images(32, 64))
    with pytest.raises(ValueError, match=message):
        irpe.equip(model, **{"spec": SPEC, **arguments})
    assert state_of(model) == before
    assert torch.equal(model(images(32, 64)), expected)


def test_nothing_to_convert():
    model = make_sam(use_rel_pos=False, use_rope=True, use_abs_pos=False)
    with pytest.raises(ValueError, match="VisionTransformerSAM has no relative encoding"):
        irpe.equip(model, OWN, builtin_bias="convert")
    with pytest.raises(ValueError, match="no absolute encoding to replace"):
        irpe.equip(model, OWN, absolute="none")
