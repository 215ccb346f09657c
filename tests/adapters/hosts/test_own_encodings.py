"""Encodings that SAM, ViTDet and Swin v2 have of their own are kept, dropped, converted."""

import functools

import pytest
import torch
from adapters.hosts.table import (
    HOSTS,
    SPEC,
    assert_same,
    gradients,
    make_vitdet,
    predict,
    randomize,
)
from adapters.small_models import images

import irpe

CONVERTED = "cross-contextual-k@clip7"  # a table row for each offset of 6 x 6, and of 4 x 8
# Sizes of images with the grids that the hosts have vectors for.
MAPS = {"SAM": (48, 48), "SAM, eager": (48, 48), "ViTDet": (48, 48), "timm's SAM": (32, 64)}


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("spec", ["cross-contextual-k", "cross-contextual-qkv@clip7+unshared"])
def test_converted_encodings_give_the_same(name, spec):
    family = HOSTS[name]
    model, inputs = family.make().double(), family.inputs(MAPS[name], torch.float64)
    expected = gradients(model, inputs)
    irpe.equip(model, spec, builtin_bias="convert")
    actual = gradients(model, inputs)
    assert not any("rel_pos" in each for each in model.state_dict())
    shared = {n: value for n, value in expected.items() if "rel_pos" not in n}
    tolerance = {"rtol": family.rtol, "atol": 0.01 * family.rtol}
    assert_same({n: v for n, v in actual.items() if ".rpe." not in n}, shared, **tolerance)
    # What the vectors learned, the tables learn: the gradients are those of R sqrt(d).
    for each in (n for n in expected if n.endswith(("rel_pos_h", "rel_pos_w"))):
        path, _, axis = each.rpartition(".rel_pos_")
        table = actual[f"{path}.rpe.key_tables.{'hw'.index(axis)}"].sum(0)
        offsets = len(expected[each]) // 2
        middle = len(table) // 2
        own = table[middle - offsets : middle + offsets + 1] * table.shape[-1] ** 0.5
        torch.testing.assert_close(own, expected[each], **tolerance)


@pytest.mark.parametrize("name", ["SAM", "ViTDet", "timm's SAM", "Swin v2"])
@pytest.mark.parametrize("builtin_bias", ["drop", "convert"])
def test_saved_models_without_their_own_encoding(name, builtin_bias, tmp_path):
    family = HOSTS[name]
    if (name, builtin_bias) == ("Swin v2", "convert"):
        pytest.skip("not a vector for each offset")
    model = irpe.equip(family.make(), CONVERTED, builtin_bias=builtin_bias)
    model, inputs = randomize(model), family.inputs()
    expected = predict(model, inputs)
    irpe.save_equipped(model, tmp_path / "ours")
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(tmp_path / "theirs")
    for path in tmp_path.iterdir():
        assert torch.equal(predict(irpe.load_equipped(path), inputs), expected)


def test_some_layers_are_converted():
    family = HOSTS["timm's SAM"]
    model, inputs = family.make(), family.inputs()
    expected = predict(model, inputs)
    irpe.equip(model, CONVERTED, builtin_bias="convert", layers=[1])
    torch.testing.assert_close(predict(model, inputs), expected, rtol=1e-4, atol=1e-5)
    left = [name for name, _ in model.named_parameters() if "rel_pos_" in name]
    assert left == ["blocks.0.attn.rel_pos_h", "blocks.0.attn.rel_pos_w"]


def test_maps_without_an_encoding_of_their_own():
    make = functools.partial(make_vitdet, use_relative_position_embeddings=False)
    inputs = {"pixel_values": images(16, 40)}
    model = irpe.equip(make(), SPEC)
    torch.testing.assert_close(predict(model, inputs), predict(make(), inputs))
    with pytest.raises(ValueError, match="no relative encoding of its own"):
        irpe.equip(make(), SPEC, builtin_bias="drop")


def test_the_shift_mask_of_swin_v2_is_added_twice_as_the_library_does():
    """With scores as large as the mask, adding it once would show."""
    family = HOSTS["Swin v2"]
    plain, inputs = family.make().double(), family.inputs(dtype=torch.float64)
    for module in plain.modules():
        if hasattr(module, "logit_scale"):
            module.logit_scale.data.fill_(4.7)  # above log 100, where it is clamped
    expected = predict(plain, inputs)
    torch.testing.assert_close(predict(irpe.equip(plain, SPEC), inputs), expected)
