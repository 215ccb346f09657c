"""Models with the encodings that the paper compares with, and with none."""

import copy
import pickle

import pytest
import torch
from adapters.small_models import (
    gradients,
    images,
    make_encoder,
    make_swin,
    make_vit,
    perturb,
    state_of,
    tokens,
)
from timm.optim import create_optimizer_v2
from torch import nn

import irpe

pytestmark = pytest.mark.filterwarnings("ignore:parameter_groups without lr")

ON_ATTENTIONS = ["shaw", "huang", "sasa", "transformer-xl", "axial-deeplab"]
KEEPING = [*ON_ATTENTIONS, "decomposed", "bias-table", "log-cpb"]
CHANGING = ["rope-axial", "rope-mixed", "alibi-2d", "rope-axial+product-contextual-k"]
FIXED = ["rope-axial", "alibi-2d"]
NAMES = [*ON_ATTENTIONS, "cpvt", "rope-mixed", "decomposed", "log-cpb", CHANGING[-1]]


def wide_vit(**arguments):
    """A vision transformer on a grid of 2x5, with a class token."""
    return make_vit(img_size=(16, 40), **arguments)


@pytest.mark.parametrize("name", KEEPING)
def test_equipping_changes_nothing_at_the_start_and_something_later(name):
    model, x = wide_vit(), images(16, 40)
    plain = model(x)
    irpe.equip(model, name)
    torch.testing.assert_close(model(x), plain)
    for table in irpe.adapters.equip.table_names(model):
        nn.init.normal_(model.get_parameter(table))
    assert not torch.allclose(model(x), plain, atol=1e-3)


@pytest.mark.parametrize("name", CHANGING)
def test_encodings_that_act_from_the_start_say_so(name):
    model, x = wide_vit(), images(16, 40)
    plain = model(x)
    irpe.equip(model, name)
    assert not torch.allclose(model(x), plain, atol=1e-3)
    spec = irpe.parse_encoding(name)
    assert f"{spec} acts from the start: outputs differ from before" in str(irpe.summary(model))
    assert "acts from the start" not in str(irpe.summary(irpe.equip(wide_vit(), "shaw")))


@pytest.mark.parametrize("name", FIXED)
def test_fixed_encodings_have_nothing_to_learn(name, tmp_path):
    model, x = irpe.equip(wide_vit(), name), images(16, 40)
    assert irpe.adapters.equip.table_names(model) == []
    assert irpe.summary(model).num_parameters == 0
    irpe.save_equipped(model, tmp_path / "model")
    assert torch.equal(irpe.load_equipped(tmp_path / "model")(x), model(x))


@pytest.mark.parametrize("name", KEEPING)
def test_other_hosts(name):
    swin, x = make_swin(), images()
    torch.testing.assert_close(irpe.equip(copy.deepcopy(swin), name)(x), swin(x))
    encoder, x = make_encoder(), tokens()
    equipped = irpe.equip(copy.deepcopy(encoder), name, grid=(2, 3))
    torch.testing.assert_close(equipped(x), encoder(x))


@pytest.mark.parametrize("name", NAMES)
def test_models_are_kept(name, tmp_path):
    model, x = perturb(irpe.equip(wide_vit(), name)), images(16, 40)
    irpe.save_equipped(model, tmp_path / "model")
    for twin in (
        irpe.load_equipped(tmp_path / "model"),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        assert torch.equal(twin(x), model(x))
        assert str(irpe.summary(twin)) == str(irpe.summary(model))
        perturb(twin, seed=5)  # independent of the first
        assert not torch.equal(twin(x), model(x))


@pytest.mark.parametrize("name", NAMES)
def test_new_parameters_do_not_decay(name):
    model = irpe.equip(wide_vit(), name)
    plain = {n for n, _ in wide_vit().named_parameters()}
    new = {n: p for n, p in model.named_parameters() if n not in plain}
    assert new
    assert set(irpe.adapters.equip.table_names(model)) == set(new)
    _, kept = irpe.parameter_groups(model, weight_decay=0.05)
    assert {id(p) for p in new.values()} <= {id(p) for p in kept["params"]}
    optimizer = create_optimizer_v2(model, opt="adamw", weight_decay=0.05)
    (of_timm,) = (g["params"] for g in optimizer.param_groups if g["weight_decay"] == 0)
    assert {id(p) for p in new.values()} <= {id(p) for p in of_timm}
    assert irpe.summary(model).num_parameters == sum(p.numel() for p in new.values())


@pytest.mark.parametrize("name", NAMES)
def test_gradient_checkpointing_with_inputs_of_several_sizes(name):
    model = perturb(irpe.equip(make_vit(dynamic_img_size=True), name)).train()

    def both(model):
        return lambda x: torch.cat([model(x), model(x[..., :16, :])])

    x = images(32, 40)
    expected = gradients(model, x, both(model))
    model.set_grad_checkpointing()
    for key, value in gradients(model, x, both(model)).items():
        torch.testing.assert_close(value, expected[key], msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name):
    model, x = perturb(irpe.equip(wide_vit(), name)), images(16, 40)
    expected = model(x)
    with torch.autocast("cpu", torch.bfloat16):
        actual = model(x)
    assert actual.dtype == torch.bfloat16
    assert (actual - expected).abs().max() < 0.1 * expected.abs().max()
    actual.float().sum().backward()
    tables = irpe.adapters.equip.table_names(model)
    assert all(model.get_parameter(table).grad.dtype == torch.float32 for table in tables)


def test_a_typo_leaves_the_model_unchanged():
    model = wide_vit()
    before = state_of(model)
    with pytest.raises(ValueError, match="did you mean 'shaw'"):
        irpe.equip(model, "shawn")
    assert state_of(model) == before


@pytest.mark.parametrize("absolute", ["keep", "none", "sinusoid"])
def test_the_absolute_encoding_alone(absolute, tmp_path):
    model, x = irpe.equip(wide_vit(), "none", absolute=absolute), images(16, 40)
    other = irpe.equip(wide_vit(), "product-contextual-k", absolute=absolute)
    torch.testing.assert_close(model(x), other(x))
    assert irpe.summary(model).num_parameters == 0
    assert irpe.parameter_groups(model, weight_decay=0.05)[0]["params"]
    assert model.no_weight_decay() == wide_vit().no_weight_decay()
    irpe.save_equipped(model, tmp_path / "model")
    assert torch.equal(irpe.load_equipped(tmp_path / "model")(x), model(x))


def test_the_absolute_encoding_alone_has_no_layers():
    model = wide_vit()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"layers \[0\]: encoding 'none' equips no layer"):
        irpe.equip(model, "none", layers=[0])
    assert state_of(model) == before
    with pytest.raises(ValueError, match="no absolute encoding to replace"):
        irpe.equip(make_swin(), "none", absolute="sinusoid")
