"""What is captured of a model: queries, keys, extra weights and attention, in any host."""

import math

import pytest
import torch
from torch import nn

import irpe
from irpe.viz import capture

timm = pytest.importorskip("timm", reason="needs the extra 'timm'")

from adapters.small_models import images, make_encoder, make_swin, make_vit, perturb, tokens  # noqa: E402


@torch.no_grad()
def plain_extra_weights(call):
    """b_ij of Eq. 14-16 in plain loops, averaged over the batch."""
    encoding, maps = call.encoding, call.encoding.maps(call.grid)
    batch, heads, count, _ = call.q.shape
    b = torch.zeros(heads, count, count)
    for head in range(heads):
        own = 0 if encoding.spec.shared_heads else head
        for i in range(count):
            for j in range(count):
                for number, item in enumerate(maps):
                    row = int(item.ids[i, j])
                    for sample in range(batch):
                        q, k = call.q[sample, head, i], call.k[sample, head, j]
                        for table in list(encoding.key_tables)[number : number + 1]:
                            b[head, i, j] += float(q @ table[own, row]) / batch
                        for table in list(encoding.query_tables)[number : number + 1]:
                            b[head, i, j] += float(k @ table[own, row]) / batch
                        for table in list(encoding.bias_tables)[number : number + 1]:
                            b[head, i, j] += float(table[own, row]) / batch
    return b


def equipped_vit(spec, **arguments):
    return perturb(irpe.equip(make_vit(**arguments), spec))


@pytest.mark.parametrize(
    "spec", ["product-contextual-k", "cross-contextual-qk+unshared", "quantization-bias-k+unshared"]
)
def test_extra_weights_are_those_of_the_equations(spec):
    model = equipped_vit(spec, dynamic_img_size=True)
    calls = capture(model, images(16, 40))
    assert [call.name for call in calls] == ["blocks.0.attn", "blocks.1.attn"]
    for call in calls:
        assert call.grid == irpe.Grid((2, 5))
        torch.testing.assert_close(call.extra_weights(), plain_extra_weights(call))


def test_attention_is_softmax_of_the_scores_with_and_without_what_the_encoding_adds():
    (call, _) = capture(equipped_vit("product-contextual-qk"), images(batch=1))
    q, k = call.q[0], call.k[0]
    scores = q @ k.transpose(-2, -1)
    root = math.sqrt(q.shape[-1])
    with_it = ((scores + call.extra_weights()) / root).softmax(-1)
    torch.testing.assert_close(call.attention(), with_it)
    torch.testing.assert_close(call.attention_without(), (scores / root).softmax(-1))
    assert (with_it - call.attention_without()).abs().max() > 0.01


def test_shares_are_of_what_softmax_sees_of_the_scores():
    (call, _) = capture(equipped_vit("product-contextual-qk"), images(batch=1))
    b, scores = call.extra_weights(), call.q[0] @ call.k[0].transpose(-2, -1)
    own, plain = (x - x.mean(-1, keepdim=True) for x in (b, scores))
    unit = float(own.square().mean().sqrt() + plain.square().mean().sqrt())
    torch.testing.assert_close(call.score_shares(), own / unit)
    assert call.encoding_share() == pytest.approx(float(own.square().mean().sqrt()) / unit)
    for table in call.encoding.parameters():
        nn.init.zeros_(table)
    assert call.encoding_share() == 0.0


def test_queries_are_those_after_the_normalisation_of_the_host():
    model = equipped_vit("product-bias-k", qk_norm=True)
    x = images()
    first = model.blocks[0]
    call = capture(model, x)[0]
    tokens_in = model._pos_embed(model.patch_embed(x))
    qkv = first.attn.qkv(first.norm1(model.norm_pre(tokens_in))).unflatten(-1, (3, 2, -1))
    q = first.attn.q_norm(qkv.permute(2, 0, 3, 1, 4)[0])
    torch.testing.assert_close(call.q, q.detach())


def test_windows_of_a_swin_transformer_with_their_mask():
    model = perturb(irpe.equip(make_swin(window_size=4), "cross-contextual-k"))
    calls = capture(model, images())
    assert [call.grid.shape for call in calls] == [(4, 4)] * 4
    assert calls[1].attn_mask is not None
    assert calls[1].q.shape[0] == 2 * 4  # two images, four windows
    sums = calls[1].attention().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_an_encoder_of_torch_with_its_own_kind_of_input():
    model = irpe.equip(make_encoder(), "product-contextual-k", grid=(2, 3))
    calls = capture(perturb(model), tokens(6))
    assert [call.name for call in calls] == ["layers.0.self_attn", "layers.1.self_attn"]
    torch.testing.assert_close(calls[0].extra_weights(), plain_extra_weights(calls[0]))


def test_a_model_in_half_precision_is_captured_in_float32():
    model = equipped_vit("product-contextual-k").to(torch.bfloat16)
    call = capture(model, images().bfloat16())[0]
    assert call.extra_weights().dtype == torch.float32


def test_the_model_is_left_as_it_was():
    model = equipped_vit("product-contextual-k", proj_drop_rate=0.5).train()
    model.blocks[1].eval()
    before = {name: module.training for name, module in model.named_modules()}
    expected = capture(model, images())[1].q
    assert {name: module.training for name, module in model.named_modules()} == before
    torch.testing.assert_close(capture(model, images())[1].q, expected, rtol=0, atol=0)
    assert not any(m._forward_pre_hooks for n, m in model.named_modules() if n.endswith("rpe"))


def test_hooks_are_removed_when_the_model_fails():
    model = equipped_vit("product-contextual-k")
    with pytest.raises(AssertionError):
        capture(model, images(40, 40))
    assert not any(m._forward_pre_hooks for n, m in model.named_modules() if n.endswith("rpe"))


def test_what_was_captured_does_not_change_with_the_model():
    model = equipped_vit("product-bias-k")
    call = capture(model, images())[0]
    before = call.extra_weights().clone()
    nn.init.zeros_(model.blocks[0].attn.rpe.bias_tables[0])
    assert torch.equal(call.extra_weights(), before)


def test_values_alone_have_no_extra_weights():
    call = capture(equipped_vit("product-contextual-v"), images())[0]
    for look in (call.extra_weights, call.attention, call.attention_without):
        with pytest.raises(ValueError, match="acts on values alone"):
            look()


def test_a_model_without_encodings_is_an_error():
    with pytest.raises(ValueError, match=r"call irpe\.equip"):
        capture(make_vit(), images())
