"""transformers' SAM, ViTDet and Swin v2: encodings of their own are kept, dropped, converted."""

import functools

import pytest
import torch
from adapters.hosts.transformers.families import FAMILIES, make_vitdet, predict
from adapters.hosts.transformers.test_families import SPEC, assert_same, gradients, randomize
from adapters.small_models import images, state_of

import irpe

CONVERTED = "cross-contextual-k@clip5"  # a table row for each offset of 6 x 6
MAPS = ["SAM", "SAM, eager", "ViTDet"]


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("spec", [CONVERTED, "cross-contextual-qkv@clip7+unshared"])
def test_converted_encodings_give_the_same(name, spec):
    family = FAMILIES[name]
    model, inputs = family.make().double(), {"pixel_values": images(48, 48).double()}
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


@pytest.mark.parametrize("name", MAPS)
def test_dropped_encodings(name):
    family = FAMILIES[name]
    model, plain = irpe.equip(family.make(), SPEC, builtin_bias="drop"), family.make()
    with torch.no_grad():
        for each, parameter in plain.named_parameters():
            if "rel_pos" in each:
                parameter.zero_()
    inputs = family.inputs()
    torch.testing.assert_close(predict(model, inputs), predict(plain, inputs), rtol=1e-4, atol=1e-4)
    assert (predict(model, inputs) - predict(family.make(), inputs)).abs().max() > 0.01


@pytest.mark.parametrize("name", ["SAM", "ViTDet", "Swin v2"])
@pytest.mark.parametrize("builtin_bias", ["drop", "convert"])
def test_saved_models_without_their_own_encoding(name, builtin_bias, tmp_path):
    family = FAMILIES[name]
    if (name, builtin_bias) == ("Swin v2", "convert"):
        pytest.skip("not a vector for each offset")
    model = irpe.equip(family.make(), CONVERTED, builtin_bias=builtin_bias)
    model, inputs = randomize(model), family.inputs()
    expected = predict(model, inputs)
    irpe.save_equipped(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    assert torch.equal(predict(irpe.load_equipped(tmp_path / "ours"), inputs), expected)
    assert torch.equal(predict(irpe.load_equipped(tmp_path / "theirs"), inputs), expected)


@pytest.mark.parametrize("name", ["BEiT", "Swin v2", "CLIP"])
def test_other_encodings_cannot_be_converted(name):
    model = FAMILIES[name].make()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"'convert'.*(is not a vector for each|has no relative)"):
        irpe.equip(model, CONVERTED, builtin_bias="convert")
    assert state_of(model) == before


def test_too_few_rows_are_refused_and_undone():
    model = FAMILIES["SAM"].make()
    before = state_of(model)
    with pytest.raises(
        ValueError, match=r"up to 5 rows or columns: use 'cross-contextual-k@clip5'"
    ):
        irpe.equip(model, "cross-contextual-k@clip4", builtin_bias="convert")
    assert state_of(model) == before


@pytest.mark.parametrize("arguments", [{"grid": (6, 6)}, {"num_prefix_tokens": 1}])
def test_maps_have_a_grid_and_no_prefix(arguments):
    with pytest.raises(ValueError, match="gets maps, whose shape is the grid; leave both"):
        irpe.equip(FAMILIES["SAM"].make(), SPEC, **arguments)


def test_maps_without_an_encoding_of_their_own():
    make = functools.partial(make_vitdet, use_relative_position_embeddings=False)
    inputs = {"pixel_values": images(16, 40)}
    model = irpe.equip(make(), SPEC)
    torch.testing.assert_close(predict(model, inputs), predict(make(), inputs))
    with pytest.raises(ValueError, match="no relative encoding of its own"):
        irpe.equip(make(), SPEC, builtin_bias="drop")


@pytest.mark.parametrize(
    ("name", "absolute"), [("SAM", "none"), ("SAM", "sinusoid"), ("ViTDet", "none")]
)
def test_absolute_encodings_are_replaced(name, absolute):
    arguments = {"use_absolute_position_embeddings": True} if name == "ViTDet" else {}
    make = functools.partial(FAMILIES[name].make, **arguments)
    inputs = {"pixel_values": images(48, 48)}
    model, plain = irpe.equip(make(), SPEC, absolute=absolute), make()
    learned = next(p for n, p in plain.named_parameters() if n.endswith(("pos_embed", "beddings")))
    with torch.no_grad():
        learned.zero_()
        if absolute == "sinusoid":
            learned += irpe.core.sinusoid.sinusoid((6, 6), 32).view(1, 6, 6, 32)
    torch.testing.assert_close(predict(model, inputs), predict(plain, inputs), rtol=1e-4, atol=1e-4)
    assert (predict(model, inputs) - predict(make(), inputs)).abs().max() > 0.01


def test_the_shift_mask_of_swin_v2_is_added_twice_as_the_library_does():
    """With scores as large as the mask, adding it once would show."""
    family = FAMILIES["Swin v2"]
    plain, inputs = family.make().double(), family.inputs(dtype=torch.float64)
    for module in plain.modules():
        if hasattr(module, "logit_scale"):
            module.logit_scale.data.fill_(4.7)  # above log 100, where it is clamped
    expected = predict(plain, inputs)
    torch.testing.assert_close(predict(irpe.equip(plain, SPEC), inputs), expected)


def test_the_bias_of_swin_v2_is_dropped():
    family = FAMILIES["Swin v2"]
    model, plain = irpe.equip(family.make(), SPEC, builtin_bias="drop"), family.make()
    with torch.no_grad():
        for each, parameter in plain.named_parameters():
            if "continuous_position_bias_mlp.2" in each:
                parameter.zero_()  # the same score for every pair
    inputs = family.inputs()
    torch.testing.assert_close(predict(model, inputs), predict(plain, inputs), rtol=1e-4, atol=1e-4)
    assert (predict(model, inputs) - predict(family.make(), inputs)).abs().max() > 0.001
    model.apply(model._init_weights)
