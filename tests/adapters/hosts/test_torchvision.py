"""What torchvision has that other libraries have not: windows inside its attention, fixed sizes."""

import functools

import oracles
import pytest
import torch
from adapters.hosts.library_models import equipped, make_torchvision_swin, make_torchvision_vit
from adapters.small_models import images, perturb
from torchvision.models import VisionTransformer
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2
from torchvision.models.vision_transformer import ConvStemConfig

import irpe
from irpe.core.sinusoid import sinusoid

SPEC = "product-contextual-qkv"


def in_windows(attention, x, shift):
    """Eq. 13-17 in windows of 2 x 4 that lie `shift` further, by loops over windows and places."""
    rows, columns = x.shape[1:3]
    index = functools.partial(oracles.clip, beta=2)
    (ids,), _ = oracles.bucket_ids("product", (2, 4), 0, index, 2)
    r_q, r_k, r_v = (t[:, torch.tensor(ids)] for (t,) in tables_of(attention))
    out = torch.empty_like(x)
    for top in range(0, rows, 2):
        for left in range(0, columns, 4):
            # A window that was moved over the border of the image comes back on the other side.
            places = [(top + i + shift[0], left + j + shift[1]) for i in range(2) for j in range(4)]
            parts = [(row >= rows, column >= columns) for row, column in places]
            row, column = (list(part) for part in zip(*places, strict=True))
            row, column = [r % rows for r in row], [c % columns for c in column]
            qkv = attention.qkv(x[:, row, column]).unflatten(-1, (3, attention.num_heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            b = torch.einsum("bhid,hijd->bhij", q, r_k) + torch.einsum("bhjd,hijd->bhij", k, r_q)
            e = (q @ k.mT + b) * q.shape[-1] ** -0.5 + attention.get_relative_position_bias()
            apart = torch.tensor([[float(a != b) for b in parts] for a in parts])
            a = (e - 100 * apart).softmax(-1)
            z = a @ v + torch.einsum("bhij,hijd->bhid", a, r_v)
            out[:, row, column] = attention.proj(z.transpose(1, 2).flatten(2))
    return out


def tables_of(attention):
    return (getattr(attention.rpe, f"{role}_tables") for role in ("query", "key", "value"))


@pytest.mark.parametrize("size", [(4, 12), (6, 8), (2, 12), (8, 4), (2, 4)])
def test_random_tables_in_windows(size):
    model = equipped(make_torchvision_swin, f"{SPEC}@clip2+unshared").double()
    for block, shift in zip(model.features[1], ((0, 0), (1, 2)), strict=True):
        x = torch.randn(2, *size, 16, dtype=torch.float64)
        shift = tuple(s if n > w else 0 for s, n, w in zip(shift, size, (2, 4), strict=True))
        expected = in_windows(block.attn, x, shift)
        torch.testing.assert_close(block.attn(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("absolute", ["none", "sinusoid"])
def test_absolute_encodings_are_replaced(absolute):
    model, plain = make_torchvision_vit(), make_torchvision_vit()
    irpe.equip(model, SPEC, absolute=absolute)
    with torch.no_grad():
        plain.encoder.pos_embedding.zero_()
        if absolute == "sinusoid":
            plain.encoder.pos_embedding[:, 1:] = sinusoid((4, 4), 32)
    x = images()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert (model(x) - make_torchvision_vit()(x)).abs().max() > 0.01
    assert "encoder.pos_embedding" not in model.state_dict()


@pytest.mark.parametrize("grid", [(2, 4), (2, 8), (16,)])
def test_a_told_grid_that_is_not_the_models_own_is_refused(grid):
    with pytest.raises(ValueError, match=r"of one size, whose grid is \(4, 4\)"):
        irpe.equip(make_torchvision_vit(), SPEC, grid=grid)
    told = irpe.equip(make_torchvision_vit(), SPEC, grid=(4, 4))
    torch.testing.assert_close(told(images()), make_torchvision_vit()(images()))


def test_a_convolutional_stem():
    torch.manual_seed(0)
    stem = [ConvStemConfig(8, 3, 2), ConvStemConfig(16, 3, 2), ConvStemConfig(16, 3, 2)]
    model = VisionTransformer(32, 8, 2, 2, 32, 48, num_classes=5, conv_stem_configs=stem).eval()
    torch.nn.init.normal_(model.heads.head.weight)
    expected = model(images())
    irpe.equip(model, SPEC)
    torch.testing.assert_close(model(images()), expected, rtol=1e-4, atol=1e-4)
    assert irpe.summary(model).attentions[0].grid == (4, 4)


def make_swin_v2(**arguments):
    return make_torchvision_swin(
        block=SwinTransformerBlockV2, downsample_layer=PatchMergingV2, **arguments
    )


@pytest.mark.parametrize("size", [(32, 64), (20, 60)])
def test_swin_v2(size, tmp_path):
    model, plain, x = make_swin_v2(), make_swin_v2(), images(*size)
    irpe.equip(model, SPEC)
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    perturb(model, seed=5)
    assert (model(x) - plain(x)).abs().max() > 0.01
    irpe.save_equipped(model, tmp_path / "model")
    assert torch.equal(irpe.load_equipped(tmp_path / "model")(x), model(x))


def test_swin_v2_by_hand():
    attention = equipped(make_swin_v2, f"{SPEC}@clip2+unshared").double().features[1][0].attn
    x = torch.randn(2, 4, 12, 16, dtype=torch.float64)
    windows = x.unflatten(2, (3, 4)).unflatten(1, (2, 2)).transpose(2, 3).reshape(-1, 8, 16)
    with torch.no_grad():
        attention.qkv.bias[16:32] = 0
        qkv = attention.qkv(windows).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        q, k, v = qkv
        q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        b = attention.rpe.scores(q, k, grid=(2, 4))
        e = (q @ k.mT + b) * attention.logit_scale.exp().clamp(max=100.0)
        a = (e + attention.get_relative_position_bias()).softmax(-1)
        (bucket_map,) = attention.rpe.maps((2, 4))
        rows = attention.rpe.value_tables[0][:, bucket_map.ids]
        z = a @ v + torch.einsum("whij,hijd->whid", a, rows)
        expected = attention.proj(z.transpose(1, 2).flatten(2)).view(2, 2, 3, 2, 4, 16)
        expected = expected.transpose(2, 3).reshape(2, 4, 12, 16)
        torch.testing.assert_close(attention(x), expected, rtol=1e-6, atol=1e-6)


def test_a_dropped_bias_of_swin_v2():
    model = irpe.equip(make_swin_v2(), SPEC, builtin_bias="drop")
    plain, x = make_swin_v2(), images(32, 64)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if "cpb_mlp.2" in name:
                parameter.zero_()  # one bias for all pairs: no bias
    torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
    assert (model(x) - make_swin_v2()(x)).abs().max() > 0.01
    assert not [name for name in model.state_dict() if "cpb_mlp" in name]
