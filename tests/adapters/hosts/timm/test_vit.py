import copy
import functools
import itertools

import oracles
import pytest
import torch
from adapters.small_models import gradients, images, make_swin, make_vit, perturb
from torch import nn

import irpe

SPEC = "product-contextual-qkv"


class LoopAttention(nn.Module):
    """An equipped attention of timm, as the paper's equations in plain loops."""

    def __init__(self, attention, spec, grid, num_prefix_tokens):
        super().__init__()
        self.plain = copy.deepcopy(attention)
        index = functools.partial(oracles.clip, beta=2)
        self.ids, _ = oracles.bucket_ids(spec.method, grid, num_prefix_tokens, index, 2)

    def forward(self, x, attn_mask=None, is_causal=False):
        plain, heads = self.plain, self.plain.num_heads
        q, k, v = plain.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = plain.q_norm(q), plain.k_norm(k)
        out = torch.empty_like(q)
        for sample, head in itertools.product(range(len(x)), range(heads)):
            vectors = (part[sample, head].tolist() for part in (q, k, v))
            result = oracles.attention(*vectors, self.ids, self.tables(head), q.shape[-1] ** -0.5)
            out[sample, head] = out.new_tensor(result[0])
        return plain.proj(out.transpose(1, 2).flatten(2))

    def tables(self, head):
        roles = {role: getattr(self.plain.rpe, f"{role}_tables") for role in ROLES}
        return {
            role: [table[min(head, len(table) - 1)].tolist() for table in tables]
            for role, tables in roles.items()
            if len(tables)
        }


ROLES = ("query", "key", "value", "bias")
LOOPS = [
    ("euclidean-contextual-qkv@clip2", {}),
    ("cross-contextual-qkv@clip2+unshared", {"name": "vit_small_patch14_reg4_dinov2"}),
    ("product-contextual-qk@clip2", {"qk_norm": True}),
    ("product-contextual-qkv@clip2", {"name": "deit_tiny_distilled_patch16_224"}),
    ("product-bias-k@clip2+unshared", {"class_token": False, "global_pool": "avg"}),
]


def loops_of(model, spec, grid):
    """The same model, its parameters under the same names, with loops for attentions."""
    twin = copy.deepcopy(model)
    for block in twin.blocks:
        block.attn = LoopAttention(block.attn, spec, grid, model.num_prefix_tokens)
    return twin


@pytest.mark.parametrize(("text", "arguments"), LOOPS)
def test_random_tables_give_what_the_papers_equations_give(text, arguments):
    spec, grid, x = irpe.RPESpec.parse(text), (2, 3), images(16, 24).double()
    model = make_vit(**arguments, img_size=(16, 24), embed_dim=8).double()
    plain = model(x).detach()
    perturb(irpe.equip(model, spec), seed=3)
    loops = loops_of(model, spec, grid)
    actual = gradients(model, x)
    with torch.no_grad():
        torch.testing.assert_close(actual["out"], loops(x), rtol=1e-9, atol=1e-9)
        assert (actual["out"] - plain).abs().max() > 0.01
        for name, parameter in loops.named_parameters():
            gradient = actual[name.replace("attn.plain.", "attn.")]
            direction = torch.randn(parameter.shape, dtype=torch.float64)
            slope = (gradient * direction).sum()
            estimate = finite_difference(loops, x, parameter, direction)
            torch.testing.assert_close(slope, estimate, rtol=1e-4, atol=1e-6, msg=name)


def finite_difference(model, x, parameter, direction, step=1e-5):
    """How the squared output changes along a direction, from two calls."""
    values = []
    for sign in (1, -2):  # one step forward, then one backward from the place of the start
        parameter.add_(direction, alpha=sign * step)
        values.append(model(x).square().sum())
    parameter.add_(direction, alpha=step)
    return (values[0] - values[1]) / (2 * step)


def image_of_patches(patches, rows, columns):
    """Lays patches out on a grid, row by row."""
    lines = [torch.cat(list(line), dim=-1) for line in patches.unflatten(0, (rows, columns))]
    return torch.cat(lines, dim=-2)[None]


def test_the_grid_is_not_guessed_from_the_number_of_tokens():
    patches = torch.randn(7 * 28, 3, 8, 8)
    wide, square = image_of_patches(patches, 7, 28), image_of_patches(patches, 14, 14)
    model = make_vit(img_size=112, dynamic_img_size=True)
    irpe.equip(model, SPEC, absolute="none")
    torch.testing.assert_close(model(wide), model(square))  # zero tables: the order alone counts
    perturb(model)
    assert (model(wide) - model(square)).abs().max() > 0.01
    for x, grid in ((wide, (7, 28)), (square, (14, 14))):
        told = make_vit(img_size=112, dynamic_img_size=True)
        irpe.equip(told, SPEC, grid=grid, num_prefix_tokens=1, absolute="none")
        told.load_state_dict(model.state_dict())
        torch.testing.assert_close(told(x), model(x), rtol=0, atol=0)


def test_a_grid_that_does_not_fit_the_input_is_refused():
    model = irpe.equip(make_vit(dynamic_img_size=True), SPEC, grid=(2, 4))
    with pytest.raises(ValueError, match=r"this input has grid \(4, 4\), but irpe.equip was told"):
        model(images())
    model = irpe.equip(make_vit(dynamic_img_size=True), SPEC, grid=(4, 4))
    assert model(images()).shape == (2, 5)
    with pytest.raises(ValueError, match=r"has grid \(2, 8\), .* leave grid= out"):
        model(images(16, 64))  # as many tokens
    model = irpe.equip(make_vit(), SPEC, num_prefix_tokens=2)
    with pytest.raises(ValueError, match="18 tokens but q has 17"):
        model(images())


def test_padded_inputs():
    model = make_vit(dynamic_img_size=True, dynamic_img_pad=True)
    x = images(13, 30)
    expected = model(x)
    torch.testing.assert_close(irpe.equip(model, SPEC)(x), expected)
    assert irpe.summary(model).attentions[0].grid == (2, 4)


def test_autocast():
    model = perturb(irpe.equip(make_vit(), SPEC))
    with torch.autocast("cpu", torch.bfloat16):
        out = model(images())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), model(images()), rtol=0.1, atol=0.1)


def test_attention_masks_reach_the_attention():
    attention = irpe.equip(make_vit(depth=1), SPEC).blocks[0].attn
    x, mask = torch.randn(2, 17, 32), torch.rand(17, 17) > 0.3
    expected = make_vit(depth=1).blocks[0].attn(x, attn_mask=mask)
    torch.testing.assert_close(attention(x, attn_mask=mask), expected)
    assert not torch.allclose(attention(x), expected, atol=1e-3)
    with pytest.raises(ValueError, match="is_causal"):
        attention(x, is_causal=True)


FEATURES = [
    (make_vit, {"out_indices": [0, 1]}),
    (make_swin, {}),
    (make_swin, {"feature_cls": "getter"}),
]


@pytest.mark.parametrize(("make", "arguments"), FEATURES)
def test_features_only(make, arguments):
    model = make(features_only=True, **arguments)
    expected = model(images())
    irpe.equip(model, SPEC)
    for actual, plain in zip(model(images()), expected, strict=True):
        torch.testing.assert_close(actual, plain)
    for actual, plain in zip(perturb(model)(images()), expected, strict=True):
        assert not torch.allclose(actual, plain, atol=1e-2)


def test_intermediate_features_follow_the_size_of_the_input():
    model = perturb(irpe.equip(make_vit(dynamic_img_size=True), SPEC))
    model(images())
    features = model.forward_intermediates(images(16, 64), intermediates_only=True)
    assert [tuple(f.shape) for f in features] == [(2, 32, 2, 8)] * 2
    assert irpe.summary(model).attentions[0].grid == (2, 8)


@pytest.mark.parametrize("make", [make_vit, make_swin])
def test_reset_classifier(make):
    model = perturb(irpe.equip(make(), SPEC))
    features = model.forward_features(images())
    model.reset_classifier(7)
    assert model(images()).shape == (2, 7)
    assert torch.equal(model.forward_features(images()), features)


@pytest.mark.parametrize("absolute", ["keep", "none", "sinusoid"])
def test_set_input_size_of_a_vit(absolute):
    model, plain = irpe.equip(make_vit(), SPEC, absolute=absolute), make_vit()
    parameters = list(dict(model.named_parameters()))
    x = images(16, 40)
    for changed in (model, plain):
        changed.set_input_size(img_size=(16, 40))
    assert list(dict(model.named_parameters())) == parameters
    out = model(x)
    assert irpe.summary(model).attentions[0].grid == (2, 5)
    with torch.no_grad():
        if absolute == "none":
            plain.pos_embed.zero_()
    if absolute != "sinusoid":
        torch.testing.assert_close(out, plain(x))
