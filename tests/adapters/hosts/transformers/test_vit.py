"""transformers' vision transformers, and what holds for all of its models."""

import copy
import functools

import pytest
import torch
import transformers
from adapters.hosts.library_models import (
    PRETRAINED,
    equipped,
    make_deit,
    make_dinov2,
    make_dinov2_with_registers,
    make_swin,
    make_vit,
    predict,
)
from adapters.small_models import images, perturb
from torch import nn

import irpe
from irpe.adapters.equipped import table_names
from irpe.core.sinusoid import sinusoid

SPEC = "product-contextual-qkv"
every_model = pytest.mark.parametrize(("make", "x", "prefix"), PRETRAINED.values(), ids=PRETRAINED)


def use(model, implementation):
    """Chooses how attention is computed; "sdpa" is the default, which not all backbones accept."""
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)


def test_masks_of_tokens_reach_the_attention():
    model, x = equipped(make_vit), images(16, 40)
    mask = torch.ones(2, 11)
    mask[:, 6:] = 0
    changed = x.clone()
    changed[:, :, 8:] += 1  # the second row of patches: tokens 6 to 10
    outs = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        outs += [model(each, attention_mask=mask).logits for each in (x, changed)]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-4, atol=1e-4)
    assert (model(changed).logits - model(x).logits).abs().max() > 0.01


@every_model
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_weights_are_returned_when_they_are_asked_for(make, x, prefix, implementation):
    model, plain = irpe.equip(make(), SPEC), make()
    use(plain, "eager")
    use(model, implementation)
    name = "encoder_attentions" if "detr" in make.__name__ else "attentions"
    expected = plain(x, output_attentions=True)[name]
    actual = model(x, output_attentions=True)[name]
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    perturb(model)
    weights = model(x, output_attentions=True)[name][0]
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    assert (weights - actual[0]).abs().max() > 0.01
    assert not model(x).get(name)


@pytest.mark.parametrize(
    ("make", "arguments"),
    [
        (functools.partial(make_vit, image_size=32), {"interpolate_pos_encoding": True}),
        (functools.partial(make_deit, image_size=32), {"interpolate_pos_encoding": True}),
        (make_dinov2, {}),
        (make_dinov2_with_registers, {}),
    ],
    ids=["ViT", "DeiT", "DINOv2", "DINOv2 with registers"],
)
@pytest.mark.parametrize("size", [(16, 64), (24, 40)])
def test_the_grid_follows_the_size_of_the_input(make, arguments, size):
    model, plain, x = irpe.equip(make(), SPEC), make(), images(*size)
    expected = plain(x, **arguments).logits
    torch.testing.assert_close(model(x, **arguments).logits, expected, rtol=1e-4, atol=1e-4)
    perturb(model, seed=3)
    told = irpe.equip(make(), SPEC, grid=(size[0] // 8, size[1] // 8))
    told.load_state_dict(model.state_dict())
    out = model(x, **arguments).logits
    assert torch.equal(told(x, **arguments).logits, out)
    assert (out - expected).abs().max() > 0.01
    if size == (16, 64):
        square = irpe.equip(make(), SPEC, grid=(4, 4))
        with pytest.raises(ValueError, match=r"input has grid \(2, 8\), but .* told grid \(4, 4\)"):
            square(x, **arguments)


ABSOLUTE = {
    "ViT": (make_vit, (2, 5)),
    "DeiT": (make_deit, (2, 5)),
    "DINOv2": (make_dinov2, (4, 4)),
    "DINOv2 with registers": (make_dinov2_with_registers, (4, 4)),
    "Swin": (functools.partial(make_swin, use_absolute_embeddings=True), (8, 16)),
}


@pytest.mark.parametrize(("make", "grid"), ABSOLUTE.values(), ids=ABSOLUTE)
@pytest.mark.parametrize("absolute", ["none", "sinusoid"])
def test_absolute_encodings_are_replaced(make, grid, absolute):
    model, plain = irpe.equip(make(), SPEC, absolute=absolute), make()
    name = next(n for n, _ in plain.named_parameters() if n.endswith("position_embeddings"))
    assert name not in model.state_dict()
    learned = plain.get_parameter(name)
    with torch.no_grad():
        learned.zero_()
        if absolute == "sinusoid":
            learned[:, -grid[0] * grid[1] :] = sinusoid(grid, learned.shape[-1])
    patch = 4 if "wi" in name else 8
    x = images(grid[0] * patch, grid[1] * patch)
    torch.testing.assert_close(predict(model, x), predict(plain, x), rtol=1e-4, atol=1e-4)
    assert (predict(model, x) - predict(make(), x)).abs().max() > 0.01


@every_model
def test_initialisation_by_the_library_leaves_tables_alone(make, x, prefix):
    for again in (
        lambda model: model.init_weights(),
        lambda model: model.post_init(),
        lambda model: model.initialize_weights(),
        lambda model: model.apply(model._init_weights),
    ):
        model = irpe.equip(make(), SPEC)
        again(model)
        assert not any(model.get_parameter(name).any() for name in table_names(model))
        trained = perturb(irpe.equip(make(), SPEC))
        before = {name: trained.get_parameter(name).clone() for name in table_names(trained)}
        again(trained)
        for name, table in before.items():
            assert torch.equal(trained.get_parameter(name), table)


@pytest.mark.parametrize("absolute", ["none", "sinusoid"])
def test_initialisation_by_the_library_leaves_a_fixed_encoding_alone(absolute):
    model = irpe.equip(make_vit(), SPEC, absolute=absolute)
    before = model.vit.embeddings.position_embeddings.clone()
    for again in (model.init_weights, model.post_init, model.initialize_weights):
        again()
    assert torch.equal(model.vit.embeddings.position_embeddings, before)


def test_backbones_and_models_that_contain_one():
    config = transformers.Dinov2Config(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    backbone = perturb(transformers.Dinov2Backbone(config).eval())
    x = images(16, 40)
    expected = backbone(x).feature_maps[0]
    model = irpe.equip(nn.ModuleDict({"backbone": copy.deepcopy(backbone)}), SPEC)
    torch.testing.assert_close(model["backbone"](x).feature_maps[0], expected)
    assert [a.name for a in irpe.summary(model).attentions] == [
        f"backbone.encoder.layer.{number}.attention" for number in range(2)
    ]
    assert not hasattr(model["backbone"].config, "irpe")
