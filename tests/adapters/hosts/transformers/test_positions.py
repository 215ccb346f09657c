"""transformers' models whose tokens are not one whole grid: masked, videos, pooled, many shapes."""

import copy
import math

import pytest
import torch
import transformers
from adapters.hosts.table import randomize
from adapters.small_models import images, perturb

import irpe
from irpe.adapters.equipped import equipped_attentions

SPEC = "product-contextual-qkv"
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 48, "patch_size": 8}
DECODER = {"decoder_hidden_size": 24, "decoder_num_hidden_layers": 1}
DECODER |= {"decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}


def make(name, config, **arguments):
    torch.manual_seed(0)
    return perturb(getattr(transformers, name)(config(**arguments)).eval())


def make_vitmae(name="ViTMAEForPreTraining"):
    sizes = {**SIZES, **DECODER, "image_size": 32, "mask_ratio": 0.5}
    return make(name, transformers.ViTMAEConfig, **sizes)


def make_videomae(name="VideoMAEForPreTraining"):
    sizes = {**SIZES, **DECODER, "image_size": (16, 24), "num_frames": 4, "tubelet_size": 2}
    if name != "VideoMAEForPreTraining":
        return make(name, transformers.VideoMAEConfig, **sizes)
    return make(name, transformers.VideoMAEConfig, **{**sizes, "image_size": 16})


def make_vivit():
    sizes = {name: size for name, size in SIZES.items() if name != "patch_size"}
    sizes |= {"image_size": 16, "num_frames": 4, "tubelet_size": [2, 8, 4]}
    return make("VivitForVideoClassification", transformers.VivitConfig, **sizes)


def make_segformer():
    sizes = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2]}
    sizes |= {"sr_ratios": [4, 2], "patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [2, 2]}
    sizes |= {"num_encoder_blocks": 2, "decoder_hidden_size": 16}
    return make("SegformerForSemanticSegmentation", transformers.SegformerConfig, **sizes)


def make_siglip2():
    return make("Siglip2VisionModel", transformers.Siglip2VisionConfig, **SIZES, num_patches=16)


def random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


NOISE = torch.rand(2, 16, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1, 0, 0, 1, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0, 1]]).bool()
GRIDS = torch.tensor([[3, 4], [2, 5]])
PADDING = torch.arange(12) < GRIDS.prod(1, keepdim=True)
KEPT = NOISE.argsort(1)[:, :8].tolist()
SEEN = [[1, 2, 4, 6, 7], [0, 3, 4, 5, 6]]


def subset(shape, tokens, prefix=0):
    return irpe.Positions(irpe.Subset(shape, tokens), None, prefix)


def reduced(rows, columns, stride):
    cells = irpe.PooledGrid((rows // stride, columns // stride), stride)
    return irpe.Positions((rows, columns), cells)


# How each is made, what it is called with, the positions in its attentions for each image.
HOSTS = {
    "ViTMAE": (
        make_vitmae,
        {"pixel_values": images(), "noise": NOISE},
        [[subset((4, 4), kept, 1) for kept in KEPT]] * 2 + [[(4, 4)] * 2],
    ),
    "VideoMAE": (
        make_videomae,
        {"pixel_values": random(2, 4, 3, 16, 16), "bool_masked_pos": MASK},
        [[subset((2, 2, 2), seen) for seen in SEEN]] * 2
        + [[subset((2, 2, 2), [*seen, *sorted({*range(8)} - {*seen})]) for seen in SEEN]],
    ),
    "VideoMAE, all patches": (
        lambda: make_videomae("VideoMAEForVideoClassification"),
        {"pixel_values": random(2, 4, 3, 16, 24)},
        [[(2, 2, 3)] * 2] * 2,
    ),
    "Vivit": (make_vivit, {"pixel_values": random(2, 4, 3, 16, 16)}, [[(2, 2, 4)] * 2] * 2),
    "Segformer": (
        make_segformer,
        {"pixel_values": images(32, 64)},
        [[reduced(8, 16, 4)] * 2, [reduced(4, 8, 2)] * 2],
    ),
    "SigLIP 2": (
        make_siglip2,
        {
            "pixel_values": random(2, 12, 192),
            "pixel_attention_mask": PADDING.long(),
            "spatial_shapes": GRIDS,
        },
        [[tuple(grid) for grid in GRIDS.tolist()]] * 2,
    ),
}
every_host = pytest.mark.parametrize(("build", "inputs", "places"), HOSTS.values(), ids=HOSTS)


def output_of(model, inputs):
    """The largest tensor that a model returns."""
    tensors = [x for x in model(**inputs).values() if isinstance(x, torch.Tensor)]
    found = max(tensors, key=torch.Tensor.numel)
    return found[PADDING] if "spatial_shapes" in inputs else found  # padding means nothing


def calls_of_encodings(model, inputs):
    """The encodings with the queries, keys and values that they were given, and their output."""
    calls, handles = [], []

    def note(encoding, args, _, output):
        calls.append((encoding, args, output))

    for attention in equipped_attentions(model).values():
        handles.append(attention.rpe.register_forward_hook(note, with_kwargs=True))
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    return calls


@every_host
def test_tokens_attend_with_the_rows_of_their_offsets(build, inputs, places, tmp_path):
    model = build()
    expected = output_of(model, inputs)
    irpe.equip(model, SPEC)
    torch.testing.assert_close(output_of(model, inputs), expected, rtol=1e-4, atol=1e-5)
    randomize(model)
    calls = calls_of_encodings(model, inputs)
    for (encoding, qkv, z), of_images in zip(calls, places, strict=True):
        for image, where in enumerate(of_images):
            count = qkv[0].shape[2]
            if "spatial_shapes" in inputs:
                count = math.prod(where)
            alone = [x[image : image + 1, :, :count] for x in qkv]
            by_hand = encoding(*alone, grid=where, impl="reference")
            torch.testing.assert_close(z[image, :, :count], by_hand[0], rtol=1e-4, atol=1e-4)
    changed = output_of(model, inputs)
    assert (changed - expected).abs().max() > 1e-2
    irpe.save_equipped(model, tmp_path / "model")
    torch.testing.assert_close(
        output_of(irpe.load_equipped(tmp_path / "model"), inputs), changed, rtol=0, atol=0
    )


def enable_checkpointing(model):
    """By the name that a release has."""
    name = "activation_checkpointing_enable"
    getattr(model, name if hasattr(model, name) else "gradient_checkpointing_enable")()


@pytest.mark.parametrize("name", ["ViTMAE", "VideoMAE"])
def test_masked_models_with_gradient_checkpointing(name):
    build, inputs, _ = HOSTS[name]
    model = randomize(irpe.equip(build(), SPEC)).train()

    def loss_gradients():
        model.zero_grad()
        output_of(model, inputs).square().mean().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    expected = loss_gradients()
    assert all(path in expected for path, _ in model.named_parameters() if ".rpe." in path)
    enable_checkpointing(model)
    for path, value in loss_gradients().items():
        torch.testing.assert_close(value, expected[path], rtol=1e-4, atol=1e-5, msg=path)


def test_a_copy_of_a_masked_model_follows_its_own_patches():
    build, inputs, _ = HOSTS["VideoMAE"]
    model = randomize(irpe.equip(build(), SPEC))
    twin = copy.deepcopy(model)
    expected = output_of(model, inputs)
    model(**{**inputs, "bool_masked_pos": inputs["bool_masked_pos"].flip(1)})
    assert torch.equal(output_of(twin, inputs), expected)


def test_the_encoder_of_a_masked_model_alone():
    whole, alone = irpe.equip(make_vitmae(), SPEC), irpe.equip(make_vitmae("ViTMAEModel"), SPEC)
    names = [each.name for each in irpe.summary(alone).attentions]
    assert names == ["layers.0.attention", "layers.1.attention"]
    assert len(irpe.summary(whole).attentions) == 3
    inputs = HOSTS["ViTMAE"][1]
    alone.load_state_dict(whole.vit.state_dict())
    torch.testing.assert_close(
        alone(**inputs).last_hidden_state, whole.vit(**inputs).last_hidden_state
    )


def test_images_of_one_shape_without_padding_are_on_a_grid():
    model = irpe.equip(make_siglip2(), SPEC)
    inputs = {
        "pixel_values": random(2, 12, 192),
        "pixel_attention_mask": torch.ones(2, 12).long(),
        "spatial_shapes": torch.tensor([[3, 4], [3, 4]]),
    }
    model(**inputs)
    assert irpe.summary(model).attentions[0].grid == (3, 4)


def test_pooled_keys_are_where_their_cells_are():
    model = irpe.equip(make_segformer(), SPEC)
    model(**HOSTS["Segformer"][1])
    assert [str(each.grid) for each in irpe.summary(model).attentions] == [
        "8x16 / 2x4 at stride 4x4",
        "4x8 / 2x4 at stride 2x2",
    ]


def test_a_mask_of_another_shape_is_refused():
    model = irpe.equip(make_videomae(), SPEC)
    source = vars(next(iter(equipped_attentions(model).values())))["rpe_grid"]
    call = irpe.adapters.grids.Embedded(
        model.videomae.embeddings, (random(2, 4, 3, 16, 16), MASK[:, :5]), {}, random(2, 3, 32)
    )
    with pytest.raises(ValueError, match=r"\(2, 5\) does not fit a video of 8 patches"):
        source.measure(call)
