"""What a model was equipped with, and how its tables reach an optimizer."""

import copy
import functools
import re

import oracles
import pytest
import torch
from adapters.small_models import (
    images,
    make_encoder,
    make_swin,
    make_vit,
)
from timm.optim import create_optimizer_v2
from torch import nn

import irpe

SPEC = "product-contextual-qkv"


@pytest.mark.parametrize("method", oracles.METHODS)
@pytest.mark.parametrize(("targets", "is_shared"), [("k", True), ("qkv", False)])
def test_summary(method, targets, is_shared):
    spec = irpe.RPESpec(method, "contextual", targets, irpe.Clip(3), is_shared)
    model = irpe.equip(make_vit(img_size=(16, 40)), spec, layers=[1])
    index = functools.partial(oracles.clip, beta=3)
    ids, rows = oracles.bucket_ids(method, (2, 5), 1, index, 3)
    (attention,) = irpe.summary(model).attentions
    assert attention.name == "blocks.1.attn"
    assert attention.spec == str(spec)
    assert attention.grid == (2, 5)
    assert attention.num_prefix_tokens == 1
    assert attention.num_buckets == sum(rows)
    assert attention.num_used_buckets == sum(len({i for row in m for i in row}) for m in ids)
    assert attention.num_parameters == sum(rows) * 16 * len(targets) * (1 if is_shared else 2)
    grown = sum(p.numel() for p in model.parameters()) - sum(
        p.numel() for p in make_vit(img_size=(16, 40)).parameters()
    )
    assert irpe.summary(model).num_parameters == attention.num_parameters == grown


USED = {"euclidean": 20, "quantization": 51, "cross": 56, "product": 50}


@pytest.mark.parametrize(("method", "used"), USED.items())
def test_used_rows_of_the_paper(method, used):
    model = irpe.equip(make_vit(img_size=224, patch_size=16, depth=1), f"{method}-contextual-k")
    (attention,) = irpe.summary(model).attentions
    assert attention.num_used_buckets == used


def test_summary_as_text():
    model = irpe.equip(make_vit(dynamic_img_size=True), "product-contextual-k", layers=[0])
    irpe.equip(model, "cross-bias-k+unshared", layers=[1])
    model(images(16, 64))
    assert str(irpe.summary(model)).splitlines() == [
        "attention      encoding                  grid   rows  used  parameters",
        "blocks.0.attn  product-contextual-k@1.9  2x8+1    50    22         800",
        "blocks.1.attn  cross-bias-k@20+unshared  2x8+1   164    20         328",
        "2 attentions, 1,128 parameters in tables",
    ]


def test_a_plain_model_has_no_summary():
    for function in (irpe.summary, lambda model: irpe.parameter_groups(model, 0.1)):
        with pytest.raises(ValueError, match=r"call irpe\.equip"):
            function(make_vit())


MODELS = {
    "vit": lambda: irpe.equip(make_vit(), "cross-bias-k+unshared"),
    "swin": lambda: irpe.equip(make_swin(), SPEC),
    "encoder": lambda: irpe.equip(make_encoder(), "product-bias-k+unshared", grid=(2, 3)),
    "attention": lambda: irpe.equip(nn.MultiheadAttention(16, 2), "cross-bias-k", grid=(2, 3)),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_parameter_groups_hold_each_parameter_once(make):
    model = make()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    decayed, kept = irpe.parameter_groups(model, weight_decay=0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    by_id = {id(p): name for name, p in model.named_parameters() if p is not frozen}
    decayed, kept = ([by_id.pop(id(p)) for p in group["params"]] for group in (decayed, kept))
    assert not by_id
    pattern = r"(^|\.)rpe\.|bias|norm|pos_embed|cls_token"
    assert decayed
    assert not [name for name in decayed if re.search(pattern, name)]
    assert not [name for name in kept if not re.search(pattern, name)]
    torch.optim.AdamW(irpe.parameter_groups(model, weight_decay=0.1))


@pytest.mark.parametrize("make", [MODELS["vit"], MODELS["swin"]], ids=["vit", "swin"])
@pytest.mark.parametrize("twin", [lambda m: m, copy.deepcopy], ids=["itself", "copy"])
@pytest.mark.parametrize("arguments", [{}, {"layer_decay": 0.75}], ids=str)
def test_optimizers_of_timm_do_not_decay_tables(make, twin, arguments):
    plain, model = make_vit() if make is MODELS["vit"] else make_swin(), twin(make())
    tables = {name for name in model.state_dict() if ".rpe." in name}
    assert model.no_weight_decay() == tables | plain.no_weight_decay()
    optimizer = create_optimizer_v2(model, opt="adamw", weight_decay=0.1, **arguments)
    decay = {id(p): g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        if name in tables:
            assert decay[id(parameter)] == 0
        if name.endswith("qkv.weight"):
            assert decay[id(parameter)] > 0


def test_no_weight_decay_of_a_copy_is_about_the_copy():
    model = irpe.equip(make_vit(), SPEC, layers=[0])
    twin = irpe.equip(copy.deepcopy(model), SPEC, layers=[1])
    assert len(twin.no_weight_decay()) == len(model.no_weight_decay()) + 3
