"""What holds for all families of timm: the encoding by hand, other sizes, checkpointing, files."""

import pytest
import torch
from adapters.hosts.library_models import equipped
from adapters.hosts.timm.by_hand import calls_of, stock_forward
from adapters.hosts.timm.families import FAMILIES, FIRST, ON_MAPS
from adapters.small_models import gradients, images, make_vit, perturb, state_of
from torch import nn

import irpe
from irpe.adapters.equipped import equipped_attentions

SPEC = "product-contextual-qkv"
every_family = pytest.mark.parametrize(("make", "x", "prefix"), FAMILIES.values(), ids=FAMILIES)
BUILT = [host[0] for name, host in FAMILIES.items() if name.partition("'s ")[2] not in ON_MAPS]
CHECKPOINTED = {name: host for name, host in FIRST.items() if "Twins" not in name}


@every_family
def test_zero_tables_change_nothing_and_random_ones_do_as_by_hand(make, x, prefix):
    model = make()
    expected = model(x).detach()
    irpe.equip(model, f"{SPEC}+unshared")
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)
    perturb(nn.ModuleList(a.rpe for a in equipped_attentions(model).values()), size=0.5)
    assert {a.num_prefix_tokens for a in irpe.summary(model).attentions} == {prefix}
    calls = calls_of(model, x)
    assert len(calls) >= 2
    for attention, args, kwargs, actual, grid in calls:
        by_hand = stock_forward(attention, args, kwargs, grid)
        torch.testing.assert_close(actual, by_hand, rtol=1e-4, atol=1e-4)
        attention.rpe.reset_parameters()
        plain = stock_forward(attention, args, kwargs, grid)
        assert (actual - plain).abs().max() > 1e-2 * plain.abs().max()


@pytest.mark.parametrize(("make", "x", "prefix"), CHECKPOINTED.values(), ids=CHECKPOINTED)
def test_gradient_checkpointing(make, x, prefix):
    model = equipped(make).train()
    torch.manual_seed(0)  # RelPos has dropout in the perceptron of its own bias
    expected = gradients(model, x)
    model.set_grad_checkpointing(True)
    torch.manual_seed(0)
    for name, value in gradients(model, x).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@every_family
def test_files(make, x, prefix, tmp_path):
    model = equipped(make)
    irpe.save_equipped(model, tmp_path / "model")
    loaded = irpe.load_equipped(tmp_path / "model", model=make())
    assert torch.equal(loaded(x), model(x))
    if make in BUILT:
        assert torch.equal(irpe.load_equipped(tmp_path / "model")(x), model(x))


def test_other_sizes_of_images():
    sizes = {"img_size": 32, "dynamic_img_size": True}
    for name in ("vit_small_patch16_dinov3", "vit_small_patch16_rope_mixed_224"):
        model = perturb(irpe.equip(make_vit(name, **sizes), SPEC))
        for size in ((16, 64), (64, 16), (40, 24)):
            x = images(*size)
            for attention, args, kwargs, actual, grid in calls_of(model, x):
                assert grid == (size[0] // 8, size[1] // 8)
                by_hand = stock_forward(attention, args, kwargs, grid)
                torch.testing.assert_close(actual, by_hand, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore::UserWarning:timm.layers.interpolate")
def test_set_input_size():
    for name in (
        "vit_small_patch16_dinov3",
        "beit_base_patch16_224",
        "vit_relpos_small_patch16_224",
    ):
        model, plain = irpe.equip(make_vit(name), SPEC), make_vit(name)
        for changed in (model, plain):
            changed.set_input_size(img_size=(16, 40))
        x = images(16, 40)
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
        assert irpe.summary(model).attentions[0].grid == (2, 5)


BIASES = ["timm's BEiT", "timm's BEiT, shared", "timm's RelPos", "timm's RelPos, shared"]


@pytest.mark.filterwarnings("ignore::UserWarning:timm.layers.interpolate")
@pytest.mark.parametrize("name", BIASES)
def test_a_dropped_bias_is_a_bias_of_zero(name):
    make, x, _ = FAMILIES[name]
    dropped, plain = irpe.equip(make(), SPEC, builtin_bias="drop"), make()
    before = plain(x)
    with torch.no_grad():
        for path, parameter in plain.named_parameters():
            if "relative_position_bias_table" in path or "rel_pos.mlp.fc2" in path:
                parameter.zero_()
    torch.testing.assert_close(dropped(x), plain(x), rtol=1e-4, atol=1e-5)
    assert (dropped(x) - before).abs().max() > 0.01
    assert not [path for path in dropped.state_dict() if "rel" in path]
    if not name.endswith("BEiT, shared"):  # whose bias is resized to the grid by timm itself
        dropped.set_input_size(img_size=32)
        assert dropped(images()).shape == before.shape


def test_a_shared_bias_is_not_dropped_in_some_layers():
    make, _, _ = FAMILIES["timm's RelPos, shared"]
    model = make()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"share one relative bias.*layers \[0\] alone"):
        irpe.equip(model, SPEC, builtin_bias="drop", layers=[0])
    assert state_of(model) == before


WRONG = [
    ("timm's DINOv3", {"builtin_bias": "drop"}, "Eva has no relative encoding of its own"),
    ("timm's DINOv3", {"absolute": "none"}, "no absolute encoding to replace"),
    ("timm's BEiT", {"builtin_bias": "convert"}, "Beit is not a vector for each offset"),
    ("timm's BEiT", {"grid": (5, 2)}, r"whose grid is \(2, 5\)"),
    ("timm's RelPos", {"absolute": "sinusoid"}, "no absolute encoding to replace"),
]


@pytest.mark.parametrize(("name", "arguments", "message"), WRONG)
def test_what_a_model_cannot_have_leaves_it_unchanged(name, arguments, message):
    model = FAMILIES[name][0]()
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        irpe.equip(model, SPEC, **arguments)
    assert state_of(model) == before


def test_sizes_that_the_host_refuses_stay_refused():
    model = irpe.equip(FAMILIES["timm's DINOv3"][0](dynamic_img_size=False), SPEC)
    with pytest.raises(AssertionError, match="doesn't match model"):
        model(images(32, 32))
