"""Models with the encodings that the paper compares with."""

import oracles_others as others
import pytest
import torch
from adapters.small_models import (
    images,
    make_encoder,
    make_swin,
    make_vit,
    perturb,
    state_of,
)

import irpe
from irpe.nn.generator import PositionGenerator


def wide_vit(**arguments):
    """A vision transformer on a grid of 2x5, with a class token."""
    return make_vit(img_size=(16, 40), **arguments)


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
    model = perturb(irpe.equip(make_vit(dynamic_img_size=True, depth=1), "cpvt"))
    assert model(images(16, 40)).shape == (2, 5)
    x = images(16, 40)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x))
    torch._dynamo.reset()
