"""timm's Swin transformers."""

import pytest
import torch
from adapters.hosts.table import make_timm_swin_v2 as make_swin_v2
from adapters.small_models import images, make_swin

import irpe

SPEC = "product-contextual-qkv"


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
