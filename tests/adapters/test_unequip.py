"""A model is what it was before it was equipped."""

import copy
import gc
import weakref

import pytest
import torch
from adapters.small_models import (
    images,
    make_encoder,
    make_swin,
    make_vit,
    state_of,
    tokens,
)
from torch import nn

import irpe
from irpe.adapters.equipped import table_names

SPEC = "product-contextual-qkv"


def fill_tables(model):
    for name in table_names(model):
        nn.init.normal_(model.get_parameter(name))
    return model


def hooks_of(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks")
    return [(name, [*getattr(m, kind)]) for name, m in model.named_modules() for kind in kinds]


@pytest.mark.parametrize(
    ("make", "arguments", "inputs"),
    [
        (make_vit, {"spec": SPEC}, images),
        (lambda: make_vit(dynamic_img_size=True), {"spec": SPEC}, images),
        (make_vit, {"spec": SPEC, "absolute": "none"}, images),
        (make_vit, {"spec": "none", "absolute": "sinusoid"}, images),
        (make_vit, {"spec": "cpvt"}, images),
        (make_vit, {"spec": "rope-mixed+product-contextual-k"}, images),
        (make_swin, {"spec": SPEC, "builtin_bias": "drop"}, images),
        (make_encoder, {"spec": SPEC, "grid": (2, 3)}, tokens),
    ],
)
def test_the_model_is_as_it_was(make, arguments, inputs):
    model, x = make(), inputs()
    before, hooks, plain = state_of(model), hooks_of(model), model(x)
    kinds = [type(module) for module in model.modules()]
    fill_tables(irpe.equip(model, **arguments))
    equipped = model(x)
    tables = irpe.unequip(model)
    assert state_of(model) == before
    assert hooks_of(model) == hooks
    assert [type(module) for module in model.modules()] == kinds
    torch.testing.assert_close(model(x), plain, rtol=0, atol=0)
    assert not torch.allclose(equipped, plain)
    assert all(".rpe." in name or ".peg." in name for name in tables)
    irpe.equip(model, **arguments)  # and can be equipped again
    with torch.no_grad():
        for name, table in tables.items():
            model.get_parameter(name).copy_(table)
    torch.testing.assert_close(model(x), equipped)


def test_two_calls_are_undone_together():
    model, x = make_vit(depth=3), images()
    before, plain = state_of(model), model(x)
    irpe.equip(model, SPEC, layers=[0])
    irpe.equip(model, "sasa", layers=[2], absolute="none")
    tables = irpe.unequip(fill_tables(model))
    assert {name.split(".")[1] for name in tables} == {"0", "2"}
    assert state_of(model) == before
    assert torch.equal(model(x), plain)


def test_what_was_trained_since_stays_and_what_comes_back_fits():
    model = irpe.equip(make_vit(), SPEC, absolute="none").double()
    with torch.no_grad():
        model.head.weight += 1
    weight = model.head.weight.clone()
    irpe.unequip(model)
    assert torch.equal(model.head.weight, weight)
    assert model.pos_embed.dtype == torch.float64
    assert model.pos_embed.requires_grad
    model(images().double()).sum().backward()


def test_loaded_models(tmp_path):
    x = images()
    plain = make_vit()
    expected = plain(x)
    irpe.save_equipped(fill_tables(irpe.equip(copy.deepcopy(plain), SPEC)), tmp_path / "all")
    loaded = irpe.load_equipped(tmp_path / "all")
    assert irpe.unequip(loaded)
    assert state_of(loaded).keys() == state_of(plain.eval()).keys()
    irpe.save_equipped(irpe.equip(plain, SPEC, absolute="none"), tmp_path / "without")
    loaded = irpe.load_equipped(tmp_path / "without")
    before = state_of(loaded)
    with pytest.raises(ValueError, match="no absolute encoding any more"):
        irpe.unequip(loaded)
    assert state_of(loaded) == before
    irpe.unequip(plain)
    assert torch.equal(plain(x), expected)
    filled = irpe.load_equipped(tmp_path / "without", model=copy.deepcopy(plain))
    assert not torch.equal(filled(x), expected)
    irpe.unequip(filled)  # which has what was removed from it
    assert torch.equal(filled(x), expected)


def test_a_plain_model_has_nothing_to_take_out():
    with pytest.raises(ValueError, match="no encodings: there is nothing to unequip"):
        irpe.unequip(make_vit())


def test_an_equipped_model_is_freed():
    model = irpe.equip(make_vit(), SPEC)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None
