"""What is counted on real models is what the closed formulas give, and what one gets by hand."""

import pytest
import torch

pytest.importorskip("timm", reason="needs the extra 'timm'")

import timm
from adapters.small_models import images, make_swin, make_vit

import irpe
from irpe.profile.count import count_macs, extra_macs, recorded_calls

ENCODINGS = [
    "product-bias-k", "product-contextual-k", "product-contextual-qkv", "cross-contextual-qkv",
    "euclidean-contextual-qv+unshared", "quantization-contextual-q", "shaw", "huang", "sasa",
    "transformer-xl", "axial-deeplab",
]  # fmt: skip
HOSTS = {
    "7x3 patches": (lambda: make_vit(img_size=(56, 24)), {}, images(56, 24)),
    "registers": (lambda: make_vit("vit_small_patch14_reg4_dinov2"), {}, images()),
    "windows": (make_swin, {}, images()),
}


def counted_and_formula(make, encoding, arguments, x):
    plain = count_macs(make(), x)
    model = irpe.equip(make(), encoding, **arguments)
    with recorded_calls(model) as calls:
        macs = count_macs(model, x)
    return macs - plain, sum(map(extra_macs, calls)), calls


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_counted_is_what_the_formulas_give(encoding, host):
    counted, formula, calls = counted_and_formula(HOSTS[host][0], encoding, *HOSTS[host][1:])
    assert calls
    assert counted == formula
    assert (counted == 0) == ("bias" in encoding)


def test_by_hand():
    def make():
        return make_vit(img_size=(56, 24))  # 7 x 3 patches and a class token, 2 heads of 16

    n, dim, layers, batch = 22, 32, 2, 2
    x = images(56, 24)
    by_hand = {
        "sasa": n * (13 + 5 + 2) * dim // 2,
        "shaw": n * min(7 * 5 + 1, n) * dim,
        "axial-deeplab@2": 3
        * n
        * (5 + 1 + 1 + 5 + 1)
        * dim,  # 5 offsets, beyond, prefix; 5, prefix
        "transformer-xl": n * n * dim + 13 * 5 * 16**2 // batch,
        "cpvt": 9 * 21 * dim,
    }
    for encoding, macs in by_hand.items():
        counted, _, _ = counted_and_formula(make, encoding, {}, x)
        assert counted == layers * batch * macs, encoding


def test_counting_leaves_no_hooks():
    model = irpe.equip(make_vit(), "shaw")
    with recorded_calls(model) as calls:
        model(images())
    model(images())
    assert len(calls) == 2
    assert not any(m._forward_pre_hooks for m in model.modules() if hasattr(m, "key_tables"))
    assert calls[0].shape == torch.Size((2, 2, 17, 16))
    assert calls[0].grid == (4, 4)


def make_pvt():
    """Keys are cells of the queries' grid, fewer than the rows in use or more."""
    sizes = {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 40, 32), "num_classes": 5}
    return timm.create_model("pvt_v2_b0", **sizes).eval()


@pytest.mark.parametrize("encoding", ["product-contextual-qkv", "cross-bias-k"])
def test_pooled_keys_cost_what_is_counted(encoding):
    counted, formula, calls = counted_and_formula(make_pvt, encoding, {}, images(64, 96))
    assert len(calls) == 4
    assert counted == formula
    with torch.device("meta"):
        on_meta, _, _ = counted_and_formula(make_pvt, encoding, {}, torch.empty(1, 3, 64, 96))
    assert on_meta * len(images(64, 96)) == counted
