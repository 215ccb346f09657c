"""transformers' vision transformers, and what holds for all of its models."""

import copy

import pytest
import torch
import transformers
from adapters.hosts.table import SPEC, TRANSFORMERS, equipped, make_vit
from adapters.small_models import images, perturb
from torch import nn

import irpe
from irpe.adapters.equipped import table_names


def test_masks_of_tokens_reach_the_attention():
    model, x = equipped(make_vit), images(16, 40)
    mask = torch.ones(2, 11)
    mask[:, 6:] = 0
    changed = x.clone()
    changed[:, :, 8:] += 1  # the second row of patches: tokens 6 to 10
    outs = []
    for implementation in ("sdpa", "eager"):
        model.set_attn_implementation(implementation)
        outs += [model(each, attention_mask=mask).logits for each in (x, changed)]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-4, atol=1e-4)
    assert (model(changed).logits - model(x).logits).abs().max() > 0.01


@pytest.mark.parametrize("name", ["ViT", "DINOv2 with registers", "Swin", "DETR"])
def test_initialisation_by_the_library_leaves_tables_alone(name):
    make = TRANSFORMERS[name].make
    for again in (
        lambda model: model.init_weights(),
        lambda model: model.post_init(),
        lambda model: model.initialize_weights(),
        lambda model: model.apply(model._init_weights),
    ):
        model = irpe.equip(make(), SPEC)
        again(model)
        assert not any(model.get_parameter(name).any() for name in table_names(model))
        trained = perturb(irpe.equip(make(), SPEC))
        before = {name: trained.get_parameter(name).clone() for name in table_names(trained)}
        again(trained)
        for name, table in before.items():
            assert torch.equal(trained.get_parameter(name), table)


@pytest.mark.parametrize("absolute", ["none", "sinusoid"])
def test_initialisation_by_the_library_leaves_a_fixed_encoding_alone(absolute):
    model = irpe.equip(make_vit(), SPEC, absolute=absolute)
    before = model.vit.embeddings.position_embeddings.clone()
    for again in (model.init_weights, model.post_init, model.initialize_weights):
        again()
    assert torch.equal(model.vit.embeddings.position_embeddings, before)


def test_backbones_and_models_that_contain_one():
    config = transformers.Dinov2Config(
        image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    backbone = perturb(transformers.Dinov2Backbone(config).eval())
    x = images(16, 40)
    expected = backbone(x).feature_maps[0]
    model = irpe.equip(nn.ModuleDict({"backbone": copy.deepcopy(backbone)}), SPEC)
    torch.testing.assert_close(model["backbone"](x).feature_maps[0], expected)
    assert [a.name for a in irpe.summary(model).attentions] == [
        f"backbone.encoder.layer.{number}.attention" for number in range(2)
    ]
    assert not hasattr(model["backbone"].config, "irpe")
