"""How much of the attention an encoding is, against attention computed by hand."""

import copy

import pytest
import torch
from adapters.small_models import images, make_encoder, make_swin, make_vit, perturb
from torch import nn

import irpe
from irpe.adapters.effect import FAR, NEXT_TO_NOTHING, measure_effect, warn_of_reach


def test_zero_tables_have_no_effect():
    for make in (make_vit, make_swin):
        model = irpe.equip(make(), "product-contextual-qkv")
        effects = measure_effect(model, images())
        assert set(effects.values()) == {0.0}
        assert set(effects) == {a.name for a in irpe.summary(model).attentions}


@pytest.mark.parametrize("text", ["product-bias-k", "product-contextual-v", "cross-contextual-qk"])
def test_the_effect_is_the_relative_change_of_the_output(text):
    model = nn.MultiheadAttention(16, 2, bias=False, batch_first=True)
    nn.init.eye_(model.out_proj.weight)
    perturb(irpe.equip(model, text, grid=(2, 3)).rpe)
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model.eval()(x, x, x, need_weights=False)[0]
        effects = measure_effect(model, x, x, x, need_weights=False)
        model.rpe.reset_parameters()
        change = whole - model(x, x, x, need_weights=False)[0]
    assert list(effects.values()) == pytest.approx([float(change.norm() / whole.norm())], rel=1e-5)
    assert effects.popitem()[1] > NEXT_TO_NOTHING


def test_a_position_generator_has_an_effect_too():
    model = irpe.equip(make_vit(), "cpvt")
    assert set(measure_effect(model, images()).values()) == {0.0}
    effects = measure_effect(perturb(model), images())
    assert len(effects) == len(irpe.summary(model).attentions)
    assert min(effects.values()) > NEXT_TO_NOTHING


def test_modes_and_hooks_are_as_before():
    model = irpe.equip(make_vit(), "product-contextual-k").train()
    model.blocks[1].eval()
    before = model.state_dict()
    measure_effect(model, images())
    assert (model.training, model.blocks[1].training) == (True, False)
    assert not any(module._forward_hooks for module in model.modules() if hasattr(module, "spec"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_summary_with_images_tells_the_effect_and_warns():
    model = irpe.equip(make_vit(), "product-contextual-k")
    text = str(irpe.summary(model, images())).splitlines()
    assert text[0].endswith("parameters  effect")
    assert text[1].endswith("0.0%")
    assert text[-2] == "without the encoding, the output of attention changes by 0.0%"
    assert text[-1].startswith("warning: the encoding is next to nothing (without it")
    assert "output changes by 0.00%)" in text[-1]
    found = irpe.summary(perturb(model), images())
    assert found.effect == pytest.approx(sum(a.effect for a in found.attentions) / 2)
    assert "warning" not in str(found)
    assert irpe.summary(model).effect is None


def test_an_encoder_of_torch_is_measured_in_eval_mode():
    model = irpe.equip(make_encoder(), "product-bias-k", grid=(2, 3)).train()
    x = torch.randn(2, 6, 16)
    assert measure_effect(model, x) == measure_effect(model, x)


def test_an_encoding_that_acts_from_the_start_is_compared_with_none():
    plain = make_vit(depth=1, pos_embed="none")
    model = irpe.equip(copy.deepcopy(plain), "rope-axial")
    outputs = []
    for each in (plain, model):
        hook = each.blocks[0].attn.proj.register_forward_pre_hook(
            lambda _, args: outputs.append(args[0].detach())
        )
        each(images())
        hook.remove()
    without, whole = outputs
    expected = float((whole - without).norm() / whole.norm())
    assert list(measure_effect(model, images()).values()) == pytest.approx([expected], rel=1e-4)
    assert expected > NEXT_TO_NOTHING


@pytest.mark.parametrize("text", ["product-bias-k", "product-contextual-k", "product-contextual-v"])
def test_tables_that_cannot_get_far_are_warned_of(text):
    model = irpe.equip(make_vit(), text)
    (said,) = warn_of_reach(model, 2.5e-4, 300)
    assert "300" in said
    assert "0.075" in said
    assert not warn_of_reach(model, 1.01 * FAR / 300, 300)
    table = next(p for n, p in model.named_parameters() if ".rpe." in n)
    with torch.no_grad():
        table[..., -1:] = -FAR
    assert not warn_of_reach(model, 2.5e-4, 300)


@pytest.mark.parametrize("text", ["none", "cpvt", "rope-axial", "rope-mixed"])
def test_what_has_no_tables_is_not_warned_of(text):
    model = make_vit() if text == "none" else irpe.equip(make_vit(), text)
    assert not warn_of_reach(model, 2.5e-4, 300)
