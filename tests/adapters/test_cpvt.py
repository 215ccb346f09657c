"""Models with the encodings that the paper compares with."""

import copy
import pickle

import oracles_others as others
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
from irpe.nn.generator import PositionGenerator

ON_ATTENTIONS = ["shaw", "huang", "sasa", "transformer-xl", "axial-deeplab"]
NAMES = [*ON_ATTENTIONS, "cpvt"]


def wide_vit(**arguments):
    """A vision transformer on a grid of 2x5, with a class token."""
    return make_vit(img_size=(16, 40), **arguments)


@pytest.mark.parametrize("name", ON_ATTENTIONS)
def test_equipping_changes_nothing_at_the_start_and_something_later(name):
    model, x = wide_vit(), images(16, 40)
    plain = model(x)
    irpe.equip(model, name)
    torch.testing.assert_close(model(x), plain)
    for table in irpe.adapters.equip.table_names(model):
        nn.init.normal_(model.get_parameter(table))
    assert not torch.allclose(model(x), plain, atol=1e-3)


@pytest.mark.parametrize("name", ON_ATTENTIONS)
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


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("grid", [(3, 5), (1, 4), (1, 1)], ids=str)
def test_the_generator_is_a_convolution_of_the_patches(grid, prefix):
    generator = perturb(PositionGenerator(3, prefix, dtype=torch.float64))
    x = torch.randn(2, prefix + grid[0] * grid[1], 3, dtype=torch.float64)
    weight, bias = generator.weight.tolist(), generator.bias.tolist()
    expected = [others.convolved(image, grid, prefix, weight, bias) for image in x.tolist()]
    torch.testing.assert_close(generator(x, grid), torch.tensor(expected, dtype=torch.float64))


def test_the_generator_refuses_another_grid():
    with pytest.raises(ValueError, match=r"grid \(2, 2\) does not hold the 6 tokens after 1"):
        PositionGenerator(3, 1)(torch.zeros(1, 7, 3), (2, 2))


@pytest.mark.parametrize(
    ("depth", "layers", "expected"),
    [(6, None, [0, 1, 2, 3, 4]), (2, None, [0, 1]), (3, [-1], [2]), (3, [2, 0], [0, 2])],
)
def test_cpvt_stands_after_the_first_five_blocks_or_those_chosen(depth, layers, expected):
    model = irpe.equip(wide_vit(depth=depth), "cpvt", layers=layers)
    names = [row.name for row in irpe.summary(model).attentions]
    assert names == [f"blocks.{number}" for number in expected]
    assert {(row.spec, row.grid) for row in irpe.summary(model).attentions} == {("cpvt", (2, 5))}


@pytest.mark.parametrize("make", ["vit_tiny_patch16_224", "vit_small_patch14_reg4_dinov2"])
def test_cpvt_is_the_model_without_absolute_encoding_and_a_generator_between_blocks(make):
    model = perturb(irpe.equip(wide_vit(name=make, depth=3), "cpvt", layers=[0, 1]))
    plain = wide_vit(name=make, depth=3)
    state = model.state_dict()
    generators = [
        [state.pop(f"blocks.{number}.peg.{part}") for part in ("weight", "bias")]
        for number in (0, 1)
    ]
    plain.load_state_dict({**state, "pos_embed": torch.zeros_like(plain.pos_embed)})
    x = images(16, 40)
    t = plain.patch_embed(x)
    t = plain.norm_pre(plain.patch_drop(plain._pos_embed(t)))
    count = plain.num_prefix_tokens
    for number, block in enumerate(plain.blocks):
        t = block(t)
        if number < 2:
            weight, bias = (part.tolist() for part in generators[number])
            t = torch.tensor(
                [others.convolved(image, (2, 5), count, weight, bias) for image in t.tolist()]
            )
    expected = plain.forward_head(plain.norm(t))
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


def test_zero_generators_change_nothing_but_the_absolute_encoding():
    x = images(16, 40)
    without = irpe.equip(wide_vit(), "product-contextual-k", absolute="none")
    torch.testing.assert_close(irpe.equip(wide_vit(), "cpvt")(x), without(x))
    sines = irpe.equip(wide_vit(), "product-contextual-k", absolute="sinusoid")
    torch.testing.assert_close(irpe.equip(wide_vit(), "cpvt", absolute="sinusoid")(x), sines(x))


def test_cpvt_works_on_a_model_without_absolute_encoding():
    model, x = wide_vit(pos_embed="none"), images(16, 40)
    expected = model(x)
    torch.testing.assert_close(irpe.equip(model, "cpvt")(x), expected)


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


def test_cpvt_beside_an_encoding_of_attentions(tmp_path):
    model = irpe.equip(irpe.equip(wide_vit(), "shaw"), "cpvt")
    perturb(model)
    names = [row.name for row in irpe.summary(model).attentions]
    assert names == ["blocks.0.attn", "blocks.1.attn", "blocks.0", "blocks.1"]
    irpe.save_equipped(model, tmp_path / "both")
    x = images(16, 40)
    assert torch.equal(irpe.load_equipped(tmp_path / "both")(x), model(x))


def test_what_cannot_have_cpvt_is_unchanged():
    swin, encoder, vit = make_swin(), make_encoder(), irpe.equip(wide_vit(), "cpvt")
    for model, arguments, message in [
        (swin, {}, "between the blocks of a VisionTransformer of timm"),
        (encoder, {"grid": (2, 3)}, "between the blocks"),
        (vit, {}, "already equipped"),
        (wide_vit(), {"layers": [7]}, "0 to 1"),
        (wide_vit(), {"layers": []}, "None for all"),
    ]:
        before = state_of(model)
        with pytest.raises(ValueError, match=message):
            irpe.equip(model, "cpvt", **arguments)
        assert state_of(model) == before


def test_attentions_in_parallel_share_one_generator():
    model = irpe.equip(make_vit("vit_small_patch16_18x2_224"), "cpvt")
    assert len(irpe.summary(model).attentions) == 2


def test_cpvt_compiles_and_follows_the_size_of_the_input():
    model = perturb(irpe.equip(make_vit(dynamic_img_size=True), "cpvt"))
    assert model(images(16, 40)).shape == (2, 5)
    x = images(16, 40)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch._dynamo.reset()
