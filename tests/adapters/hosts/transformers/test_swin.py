"""transformers' Swin transformers."""

import functools

import torch
from adapters.hosts.table import (
    equipped,
    make_swin,
    predict,
)
from adapters.small_models import images

import irpe

SPEC = "product-contextual-qkv"


def test_windows_that_shrink_with_the_input():
    model = equipped(functools.partial(make_swin, window_size=7), builtin_bias="drop")
    small = functools.partial(make_swin, window_size=4)
    other = irpe.equip(small(), SPEC, builtin_bias="drop")
    other.load_state_dict(model.state_dict())
    x = images(16, 32)  # grids of 4 x 8 and 2 x 4: windows of 4 and 2, none of them shifted
    torch.testing.assert_close(predict(model, x), predict(other, x), rtol=1e-4, atol=1e-4)
    grids = [attention.grid for attention in irpe.summary(model).attentions]
    assert grids == [(4, 4), (4, 4), (2, 2), (2, 2)]


def test_a_swin_without_an_absolute_encoding_needs_none():
    x = images(32, 64)
    model = irpe.equip(make_swin(), SPEC, absolute="none")
    torch.testing.assert_close(predict(model, x), predict(make_swin(), x), rtol=1e-4, atol=1e-4)
