"""What transformers has that other libraries have not: masks, weights, configurations, DETR."""

import copy
import functools

import pytest
import torch
import transformers
from adapters.hosts.library_models import (
    HOSTS,
    equipped,
    make_deit,
    make_detr,
    make_dinov2,
    make_dinov2_with_registers,
    make_segmenter,
    make_swin,
    make_vit,
    predict,
)
from adapters.small_models import images, perturb, state_of
from torch import nn
from transformers import AttentionInterface
from transformers.models.detr.modeling_detr import DetrSelfAttention, DetrSinePositionEmbedding

import irpe
from irpe.adapters.equipped import equipped_attentions, table_names
from irpe.core.sinusoid import sinusoid

SPEC = "product-contextual-qkv"
PRETRAINED = {name: host for name, host in HOSTS.items() if "torchvision" not in name}
every_model = pytest.mark.parametrize(("make", "x", "prefix"), PRETRAINED.values(), ids=PRETRAINED)


def use(model, implementation):
    """Chooses how attention is computed; "sdpa" is the default, which not all backbones accept."""
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)


# DETR: a padded batch.

REAL = (3, 5)  # the real part of a feature map of 4 x 7


def encode(model, features, mask=None):
    """The output of DETR's encoder for a feature map, as DetrModel computes it."""
    detr = model.model
    x = detr.input_projection(features).flatten(2).transpose(1, 2)
    mask = torch.ones(len(features), *features.shape[-2:]) if mask is None else mask
    position = detr.position_embedding(
        shape=features.shape, device=x.device, dtype=x.dtype, mask=mask.bool()
    )
    out = detr.encoder(
        inputs_embeds=x,
        attention_mask=mask.flatten(1).bool(),
        spatial_position_embeddings=position.flatten(2).transpose(1, 2),
    )
    return out.last_hidden_state.unflatten(1, features.shape[-2:])


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "spec", [SPEC, "cross-contextual-qkv+unshared", "quantization-bias-k", "euclidean-contextual-k"]
)
def test_padding_does_not_reach_the_real_part_of_a_feature_map(implementation, spec):
    model = equipped(make_detr, spec)
    use(model, implementation)
    features = torch.randn(2, 16, 4, 7)
    mask = torch.zeros(2, 4, 7)
    mask[0, : REAL[0], : REAL[1]] = 1
    mask[1] = 1
    with torch.no_grad():
        alone = encode(model, features[:1, :, : REAL[0], : REAL[1]])
        padded = encode(model, features, mask)
        other = encode(model, features[1:])
        unmasked = encode(model, features)
    torch.testing.assert_close(padded[:1, : REAL[0], : REAL[1]], alone, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(padded[1:], other, rtol=1e-4, atol=1e-4)
    assert (unmasked[:1, : REAL[0], : REAL[1]] - alone).abs().max() > 0.01


def test_the_mask_of_an_image_reaches_the_attentions():
    mask = torch.ones(2, 96, 160)
    mask[0, :, 96:] = 0
    out = equipped(make_detr)(images(96, 160), pixel_mask=mask, output_attentions=True)
    assert len(out.encoder_attentions) == 2
    for weights in out.encoder_attentions:
        to_keys = weights.unflatten(-1, (3, 5))
        assert not to_keys[0, ..., 3:].any()
        assert to_keys[0, ..., :3].all()
        assert to_keys[1].all()


def test_only_the_encoder_of_detr_is_equipped_and_its_grid_follows_the_input():
    model = equipped(make_detr)
    assert all("encoder" in name for name in equipped_attentions(model))
    stock = [m for m in model.modules() if type(m) is DetrSelfAttention]
    assert len(stock) == len(model.model.decoder.layers)
    for size, grid in (((96, 160), (3, 5)), ((64, 64), (2, 2)), ((32, 224), (1, 7))):
        model(images(*size))
        assert {a.grid for a in irpe.summary(model).attentions} == {grid}
    assert irpe.summary(irpe.equip(make_detr(), SPEC)).attentions[0].grid is None


def test_features_of_one_size_and_two_shapes_are_told_apart():
    model = equipped(make_detr, absolute="none")
    told = irpe.equip(make_detr(), SPEC, grid=(2, 8), absolute="none")
    told.load_state_dict(model.state_dict())
    wide, square = torch.randn(1, 16, 2, 8), torch.randn(1, 16, 4, 4)
    torch.testing.assert_close(encode(model, wide), encode(told, wide))
    assert (encode(model, square) - encode(told, square)).abs().max() > 0.01


def test_embeddings_without_a_feature_map_need_a_told_grid():
    embeds = torch.randn(1, 16, 32)
    model = equipped(make_detr)
    model(images(64, 256))  # a grid of 2 x 8, which has as many tokens
    with pytest.raises(ValueError, match=r"grid=\(rows, columns\)"):
        model.model(inputs_embeds=embeds)
    told = irpe.equip(make_detr(), SPEC, grid=(4, 4))
    told.load_state_dict(model.state_dict())
    assert told.model(inputs_embeds=embeds).last_hidden_state.shape == (1, 5, 32)


@pytest.mark.parametrize("kind", ["sine", "learned"])
def test_no_absolute_encoding_in_detr(kind):
    make = functools.partial(make_detr, position_embedding_type=kind)
    model, plain = irpe.equip(make(), SPEC, absolute="none"), make()
    assert not any("position_embedding." in name for name in model.state_dict())
    for layer in (*plain.model.encoder.layers, *plain.model.decoder.layers):
        layer.register_forward_pre_hook(without_position, with_kwargs=True)
    x = images(96, 160)
    torch.testing.assert_close(predict(model, x), predict(plain, x), rtol=1e-4, atol=1e-4)
    assert (predict(model, x) - predict(make(), x)).abs().max() > 0.01


def without_position(layer, args, kwargs):
    """Takes the absolute encoding from a stock layer; the object queries stay."""
    if "spatial_position_embeddings" in kwargs:
        return args, {**kwargs, "spatial_position_embeddings": None}
    return (*args[:2], None, *args[3:]), kwargs


def test_a_sinusoid_in_detr():
    model = make_detr()
    before = state_of(model)
    with pytest.raises(ValueError, match="a fixed sinusoid already; use 'keep' or 'none'"):
        irpe.equip(model, SPEC, absolute="sinusoid")
    assert state_of(model) == before
    learned = make_detr(position_embedding_type="learned")
    irpe.equip(learned, SPEC, absolute="sinusoid")
    assert isinstance(learned.model.position_embedding, DetrSinePositionEmbedding)
    missing, unexpected = learned.load_state_dict(model.state_dict(), strict=False)
    assert not unexpected
    assert all(".rpe." in name for name in missing)
    x = images(96, 160)
    torch.testing.assert_close(predict(learned, x), predict(model, x), rtol=1e-4, atol=1e-4)


def test_detr_has_no_prefix_tokens():
    with pytest.raises(ValueError, match="num_prefix_tokens 1"):
        irpe.equip(make_detr(), SPEC, num_prefix_tokens=1)


def test_segmentation_with_detr():
    model = make_segmenter()
    x = images(96, 160)
    expected = model(x).pred_masks
    irpe.equip(model, SPEC)
    torch.testing.assert_close(model(x).pred_masks, expected, rtol=1e-3, atol=1e-3)
    assert irpe.summary(model).attentions[0].grid == (3, 5)


# Masks, weights, sizes.


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


def test_implementations_that_lose_masks_are_refused():
    model = equipped(make_detr)
    AttentionInterface.register("mine", lambda *args, **kwargs: None)
    model.set_attn_implementation("mine")
    with pytest.raises(ValueError, match=r"'mine'.*eager, sdpa"):
        model(images(96, 160))


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
@pytest.mark.parametrize("size", [(32, 32), (16, 64), (64, 16), (24, 40)])
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
        square.load_state_dict(model.state_dict())
        assert (square(x, **arguments).logits - out).abs().max() > 0.01


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (make_dinov2, [images(16, 64), images(64, 16)]),
        (functools.partial(make_detr, dropout=0.0), [images(64, 256), images(256, 64)]),
    ],
    ids=["DINOv2", "DETR"],
)
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_gradient_checkpointing_of_two_shapes_in_one_step(make, inputs):
    model = equipped(make).train()
    gradients = []
    for enable in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        enable()
        model.zero_grad()
        sum(predict(model, x).square().sum() for x in inputs).backward()
        gradients.append(
            {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        )
    assert any(".rpe." in name for name in gradients[0])
    for name, expected in gradients[0].items():
        scale = float(expected.abs().max())
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-3, atol=1e-4 * scale)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_autocast_of_a_padded_batch(implementation):
    model = equipped(make_detr)
    use(model, implementation)
    x, mask = images(96, 160), torch.ones(2, 96, 160)
    mask[0, :, 96:] = 0
    expected = model(x, pixel_mask=mask).logits
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = model(x, pixel_mask=mask).logits
    assert (actual.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_windows_that_shrink_with_the_input():
    model = equipped(functools.partial(make_swin, window_size=7), builtin_bias="drop")
    small = functools.partial(make_swin, window_size=4)
    other = irpe.equip(small(), SPEC, builtin_bias="drop")
    other.load_state_dict(model.state_dict())
    x = images(16, 32)  # grids of 4 x 8 and 2 x 4: windows of 4 and 2, none of them shifted
    torch.testing.assert_close(predict(model, x), predict(other, x), rtol=1e-4, atol=1e-4)
    grids = [attention.grid for attention in irpe.summary(model).attentions]
    assert grids == [(4, 4), (4, 4), (2, 2), (2, 2)]


# Absolute encodings.

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


def test_a_swin_without_an_absolute_encoding_needs_none():
    x = images(32, 64)
    model = irpe.equip(make_swin(), SPEC, absolute="none")
    torch.testing.assert_close(predict(model, x), predict(make_swin(), x), rtol=1e-4, atol=1e-4)


# What the library does to its models.


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


def test_other_models_of_the_library_are_refused():
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = transformers.ViTMSNModel(transformers.ViTMSNConfig(**sizes, intermediate_size=32))
    with pytest.raises(ValueError, match="transformers' ViT, DeiT, DINOv2"):
        irpe.equip(model, SPEC)
