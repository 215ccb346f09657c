"""transformers' vision transformers, each in what it has of its own."""

import itertools

import pytest
import torch
import transformers
from adapters.hosts.table import HOSTS, SPEC, TOWER, build, make_pair, predict, randomize
from adapters.small_models import images, state_of

import irpe
from irpe.adapters.equipped import equipped_attentions
from irpe.adapters.hosts.transformers.attention_interface import Windows


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_the_text_tower_and_the_pooling_head_stay_as_they_are(name):
    model = make_pair(name)()
    inputs = {"pixel_values": images(), "input_ids": torch.tensor([[1, 5, 3, 2]])}
    before, expected = state_of(model.text_model), model(**inputs)
    irpe.equip(model, SPEC)
    assert state_of(model.text_model) == before
    attentions = irpe.summary(model).attentions
    assert {each.name.partition(".")[0] for each in attentions} == {"vision_model"}
    assert {each.grid for each in attentions} == {(4, 4)}
    actual = model(**inputs)
    torch.testing.assert_close(actual.image_embeds, expected.image_embeds, rtol=1e-4, atol=1e-4)
    changed = randomize(model)(**inputs)
    assert torch.equal(changed.text_embeds, expected.text_embeds)
    assert (changed.image_embeds - expected.image_embeds).abs().max() > 0.01
    assert not any(".rpe." in n for n, _ in model.vision_model.named_modules() if "head" in n)


PATCHIFIED = {**TOWER, "num_patches": 16}
del PATCHIFIED["image_size"]


def patchified(grid, patches=None):
    """Inputs of SigLIP 2: patches of images, and their grids."""
    patches = grid[0] * grid[1] if patches is None else patches
    mask = torch.arange(patches)[None] < grid[0] * grid[1]
    return {
        "pixel_values": torch.randn(1, patches, 192, generator=torch.Generator().manual_seed(0)),
        "pixel_attention_mask": mask.long(),
        "spatial_shapes": torch.tensor([grid]),
    }


def make_siglip2():
    return build("Siglip2VisionModel", "Siglip2VisionConfig", **PATCHIFIED)


def test_siglip2_can_be_told_one_grid_for_all_images():
    model, inputs = make_siglip2(), patchified((2, 5))
    expected = predict(model, inputs)
    irpe.equip(model, SPEC, grid=(2, 5))
    torch.testing.assert_close(predict(model, inputs), expected, rtol=1e-4, atol=1e-4)
    assert (predict(randomize(model), inputs) - expected).abs().max() > 0.01
    for other in (patchified((5, 2)), patchified((2, 5), patches=16)):
        with pytest.raises(ValueError, match=r"equipped with grid=\(2, 5\)"):
            model(**other)


def test_sizes_that_the_host_refuses_leave_no_grid_behind():
    model = HOSTS["CLIP"].equipped()
    inputs = HOSTS["CLIP"].inputs((40, 16))
    expected = predict(model, inputs)
    with pytest.raises(ValueError, match="doesn't match model"):
        model(images(16, 40))
    assert torch.equal(predict(model, inputs), expected)


def test_detection_tokens_share_the_row_of_the_class_token():
    """Filled with one vector, the last row acts on all pairs with a token that is not a patch."""
    model = irpe.equip(HOSTS["YOLOS"].make(num_hidden_layers=1), "product-contextual-k@clip1")
    (attention,) = equipped_attentions(model).values()
    with torch.no_grad():
        attention.rpe.key_tables[0][:, -1] = 1.0
    q = torch.randn(1, 2, 16, 16)
    scores = attention.rpe.scores(q.roll(5, 2), q, grid=(2, 5)).roll((-5, -5), (-2, -1))
    patches = slice(1, 11)
    assert not scores[:, :, patches, patches].any()
    expected = q.sum(-1, keepdim=True).expand(-1, -1, -1, 16).clone()
    expected[:, :, patches, patches] = 0
    torch.testing.assert_close(scores, expected)


def test_one_implementation_for_a_whole_model():
    """Attentions without tables are computed as by "sdpa", and masks arrive."""
    model = HOSTS["Conditional DETR"].equipped(layers=[1])
    x, mask = images(96, 160), torch.ones(2, 96, 160)
    mask[0, :, 96:] = 0
    expected = model(x, pixel_mask=mask)
    model.set_attn_implementation("irpe")
    actual = model(x, pixel_mask=mask)
    torch.testing.assert_close(actual.logits, expected.logits)
    torch.testing.assert_close(actual.pred_boxes, expected.pred_boxes)
    assert (model(x).logits - expected.logits).abs().max() > 0.001


@pytest.mark.parametrize("name", ["RT-DETR", "RT-DETR v2", "D-FINE"])
def test_the_decoder_keeps_its_attentions(name):
    model = HOSTS[name].make()
    before = state_of(model.model.decoder)
    irpe.equip(model, SPEC)
    assert state_of(model.model.decoder) == before
    assert all(
        each.name.startswith("model.encoder.aifi.0.") for each in irpe.summary(model).attentions
    )
    assert irpe.summary(model).attentions[0].grid is None


def test_no_absolute_encoding_in_a_hybrid_encoder():
    family = HOSTS["RT-DETR"]
    model, plain = irpe.equip(family.make(), SPEC, absolute="none"), family.make()
    plain.model.encoder.aifi[0].eval_size = (96, 160)  # with which the library leaves it out
    inputs = family.inputs()
    torch.testing.assert_close(predict(model, inputs), predict(plain, inputs), rtol=1e-4, atol=1e-4)
    assert (predict(model, inputs) - predict(family.make(), inputs)).abs().max() > 0.001


def test_layers_are_equipped_one_after_the_other():
    for name in ("DINOv3", "RT-DETR"):
        family = HOSTS[name]
        model, other = family.equipped(), family.make()
        for layer in (1, 0):
            irpe.equip(other, SPEC, layers=[layer])
        other.load_state_dict(model.state_dict())
        for size in family.sizes:
            assert torch.equal(
                predict(other, family.inputs(size)), predict(model, family.inputs(size))
            )


def test_models_that_contain_a_tower():
    config = transformers.DPTConfig(
        backbone_config=transformers.Dinov2Config(
            **{**TOWER, "out_features": ["stage1", "stage2"], "reshape_hidden_states": False}
        ),
        neck_hidden_sizes=[8, 8], fusion_hidden_size=8, num_labels=3, reassemble_factors=[1, 1],
    )  # fmt: skip
    model = transformers.DPTForDepthEstimation(config).eval()
    irpe.equip(model, SPEC)
    assert len(irpe.summary(model).attentions) == 2


def test_an_attention_that_joins_windows_sees_the_grid_of_the_image():
    """Blocks that all join the windows compute what a model without windows does."""
    family = HOSTS["LW-DETR's ViT"]
    for size, grid in family.sizes.items():
        inputs = family.inputs(size)
        joined, plain = family.equipped(), randomize(irpe.equip(family.make(num_windows=1), SPEC))
        assert torch.equal(predict(joined, inputs), predict(plain, inputs))
        assert {a.grid for a in irpe.summary(joined).attentions} == {grid}


def test_an_attention_in_windows_sees_the_grid_of_a_window():
    family, x = HOSTS["LW-DETR's ViT"], images(32, 64)
    windowed = {"window_block_indices": [0, 1]}
    model = randomize(irpe.equip(family.make(**windowed), SPEC, absolute="none"))
    plain = randomize(irpe.equip(family.make(num_windows=1), SPEC, absolute="none"))
    whole = model(x).feature_maps[0]
    assert {a.grid for a in irpe.summary(model).attentions} == {(2, 4)}
    for rows, columns in itertools.product((slice(0, 2), slice(2, 4)), (slice(0, 4), slice(4, 8))):
        window = x.unflatten(3, (8, 8)).unflatten(2, (4, 8))[:, :, rows, :, columns]
        (expected, *_) = plain(window.flatten(4, 5).flatten(2, 3)).feature_maps
        torch.testing.assert_close(whole[:, :, rows, columns], expected)


def test_class_tokens_of_windows_stand_before_the_patches():
    order = Windows(2, 1)(4 * (1 + 2 * 1), (4, 2)).tolist()
    assert order == [0, 3, 6, 9, 1, 4, 2, 5, 7, 10, 8, 11]


def test_images_that_are_not_square_are_refused_where_the_library_mixes_up_their_windows():
    with pytest.raises(irpe.UserError, match="4 x 8 patches: RF-DETR mixes up"):
        HOSTS["RF-DETR's DINOv2"].equipped()(images(32, 64))


@pytest.mark.parametrize("kind", [None, torch.bool, torch.float32], ids=str)
def test_a_bias_that_a_host_passes_to_the_registry_is_added(kind):
    """As attentions of the kind of T5 do."""
    model, x = HOSTS["ViTMSN"].equipped(), images()
    attention = next(iter(equipped_attentions(model).values()))
    bias = torch.randn(1, 2, 17, 17)
    allowed = torch.rand(1, 1, 17, 17) > 0.3
    masks = {torch.bool: (allowed, bias.masked_fill(~allowed, -torch.inf))}
    masks |= {None: (None, bias), torch.float32: (bias, 2 * bias)}
    mask, together = masks[kind]
    tokens = torch.randn(1, 17, 32)
    model(x)
    expected, _ = attention(tokens, attention_mask=together)
    actual, _ = attention(tokens, attention_mask=mask, position_bias=bias)
    torch.testing.assert_close(actual, expected)
    assert (actual - attention(tokens, attention_mask=mask)[0]).abs().max() > 0.01
