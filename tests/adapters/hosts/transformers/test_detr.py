"""The encoder of transformers' DETR: padded batches, feature maps, absolute encodings."""

import functools

import pytest
import torch
from adapters.hosts.table import (
    equipped,
    make_detr,
    make_segmenter,
    predict,
    use,
)
from adapters.small_models import images, state_of
from transformers import AttentionInterface
from transformers.models.detr.modeling_detr import DetrSelfAttention, DetrSinePositionEmbedding

import irpe
from irpe.adapters.equipped import equipped_attentions

SPEC = "product-contextual-qkv"


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


@pytest.mark.parametrize(
    ("spec", "implementation"),
    [
        (SPEC, "sdpa"),
        (SPEC, "eager"),
        ("cross-contextual-qkv+unshared", "sdpa"),
        ("quantization-bias-k", "eager"),
        ("euclidean-contextual-k", "sdpa"),
    ],
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
    with pytest.raises(ValueError, match=r"input has grid \(4, 4\), but .* told grid \(2, 8\)"):
        encode(told, square)


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


def test_segmentation_with_detr():
    model = make_segmenter()
    x = images(96, 160)
    expected = model(x).pred_masks
    irpe.equip(model, SPEC)
    torch.testing.assert_close(model(x).pred_masks, expected, rtol=1e-3, atol=1e-3)
    assert irpe.summary(model).attentions[0].grid == (3, 5)


def test_implementations_that_lose_masks_are_refused():
    model = equipped(make_detr)
    AttentionInterface.register("mine", lambda *args, **kwargs: None)
    model.set_attn_implementation("mine")
    with pytest.raises(ValueError, match=r"'mine'.*eager, sdpa"):
        model(images(96, 160))


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
