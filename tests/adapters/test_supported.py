"""Whether a model can be equipped, asked without touching it."""

import pytest
import torch
from adapters.small_models import make_encoder, make_swin, make_vit, state_of
from torch import nn

import irpe


def test_a_model_that_can_be_equipped_stays_as_it_is():
    model = make_vit()
    before = state_of(model)
    support = irpe.supported(model)
    assert support
    assert support.attentions == tuple(f"blocks.{i}.attn" for i in range(len(model.blocks)))
    assert str(support).startswith("VisionTransformer can be equipped: ")
    assert "timm.layers.attention.Attention" in str(support)
    assert state_of(model) == before


def test_a_bias_of_its_own_is_mentioned():
    assert "relative encoding of their own (builtin_bias=)" in str(irpe.supported(make_swin()))


def test_reasons_are_those_of_equip():
    for model in (nn.Linear(2, 2), irpe.equip(make_vit(), "shaw")):
        support = irpe.supported(model)
        assert not support
        with pytest.raises(ValueError, match="equipped") as refused:
            irpe.equip(model, "shaw")
        assert str(refused.value) == str(support)


def test_a_grid_can_be_given():
    assert "pass grid=" in str(irpe.supported(make_encoder()))
    assert irpe.supported(make_encoder(), grid=(2, 3))


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"not a torch\.nn\.Module"):
        irpe.supported(torch.zeros(3))
