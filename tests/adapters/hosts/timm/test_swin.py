"""timm's Swin transformers."""

import functools

import oracles
import pytest
import torch
from adapters.hosts.timm.families import make_swin_v2
from adapters.small_models import images, make_swin, perturb

import irpe

SPEC = "product-contextual-qkv"
SWINS = {
    "window 7, shifted": {},
    "window 4, shifted": {"window_size": 4},
    "window 2x4, shifted": {"window_size": (2, 4)},
    "input not square": {"img_size": (32, 64), "window_size": (2, 4)},
}


def size_of(model):
    return model.patch_embed.img_size


@pytest.mark.parametrize("arguments", SWINS.values(), ids=SWINS)
def test_zero_tables_change_nothing_in_a_swin(arguments):
    model = make_swin(**arguments)
    x = images(*size_of(model))
    assert any(max(block.shift_size) > 0 for layer in model.layers for block in layer.blocks)
    expected = model(x)
    torch.testing.assert_close(irpe.equip(model, SPEC)(x), expected)
    windows = [block.window_size for layer in model.layers for block in layer.blocks]
    assert [a.grid for a in irpe.summary(model).attentions] == windows
    assert not torch.allclose(perturb(model)(x), expected, atol=1e-2)


def swin_attention(attention, x, shift, ids):
    """Eq. 13-17 in a window, with Swin's own bias and the mask of shifted windows."""
    q, k, v = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    (r_q,), (r_k,), (r_v,) = (
        getattr(attention.rpe, f"{role}_tables") for role in ("query", "key", "value")
    )
    b = torch.einsum("whid,hijd->whij", q, r_k[:, ids])
    b = b + torch.einsum("whjd,hijd->whij", k, r_q[:, ids])
    e = (q @ k.mT + b) * q.shape[-1] ** -0.5
    if attention.relative_position_bias_table is not None:
        index = attention.relative_position_index
        e = e + attention.relative_position_bias_table[index].permute(2, 0, 1)
    if shift is not None:
        e = e + shift.repeat(len(x) // len(shift), 1, 1)[:, None]
    a = e.softmax(-1)
    z = a @ v + torch.einsum("whij,hijd->whid", a, r_v[:, ids])
    return attention.proj(z.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("builtin_bias", ["keep", "drop"])
@pytest.mark.parametrize("arguments", SWINS.values(), ids=SWINS)
def test_random_tables_in_windows(arguments, builtin_bias):
    model = make_swin(**arguments)
    perturb(irpe.equip(model, f"{SPEC}@clip2+unshared", builtin_bias=builtin_bias))
    index = functools.partial(oracles.clip, beta=2)
    for number, block in enumerate(model.layers[0].blocks):
        (ids,), _ = oracles.bucket_ids("product", block.window_size, 0, index, 2)
        shift = block.attn_mask
        assert (shift is not None) == (number == 1)
        windows = 2 * (1 if shift is None else len(shift))
        x = torch.randn(windows, len(ids), 16)
        expected = swin_attention(block.attn, x, shift, torch.tensor(ids))
        torch.testing.assert_close(block.attn(x, shift), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("arguments", SWINS.values(), ids=SWINS)
def test_a_dropped_bias_is_a_bias_of_zero(arguments):
    model, expected = make_swin(**arguments), make_swin(**arguments)
    x = images(*size_of(model))
    before = model(x)
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            if "relative_position_bias_table" in name:
                parameter.zero_()
    irpe.equip(model, SPEC, builtin_bias="drop")
    torch.testing.assert_close(model(x), expected(x))
    assert not torch.allclose(model(x), before, atol=1e-2)
    assert not [name for name in model.state_dict() if "relative_position_bias_table" in name]


@pytest.mark.filterwarnings("ignore::UserWarning:timm.layers.interpolate")
@pytest.mark.parametrize("builtin_bias", ["keep", "drop"])
def test_set_input_size_of_a_swin(builtin_bias):
    model, plain = irpe.equip(make_swin(), SPEC, builtin_bias=builtin_bias), make_swin()
    if builtin_bias == "drop":
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                if "relative_position_bias_table" in name:
                    parameter.zero_()
    x = images(32, 64)
    for changed in (model, plain):
        changed.set_input_size(img_size=(32, 64), window_size=(2, 4))
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert [a.grid for a in irpe.summary(model).attentions] == [(2, 4)] * 4


@pytest.mark.parametrize("builtin_bias", ["keep", "drop"])
def test_set_input_size_of_a_swin_v2(builtin_bias):
    model, plain = irpe.equip(make_swin_v2(), SPEC, builtin_bias=builtin_bias), make_swin_v2()
    x = images(64, 32)
    for changed in (model, plain):
        changed.set_input_size(img_size=(64, 32), window_size=(4, 2))
    if builtin_bias == "keep":
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert model(x).shape == plain(x).shape
    assert [a.grid for a in irpe.summary(model).attentions] == [(4, 2)] * 4


def test_a_dropped_bias_of_a_swin_v2_is_the_same_for_all_pairs():
    model, plain = irpe.equip(make_swin_v2(), SPEC, builtin_bias="drop"), make_swin_v2()
    x = images(32, 64)
    before = plain(x)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "cpb_mlp.2" in name:
                parameter.zero_()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert (model(x) - before).abs().max() > 0.01
    assert not [name for name in model.state_dict() if "cpb_mlp" in name]
