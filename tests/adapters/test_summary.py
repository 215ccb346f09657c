"""What a model was equipped with."""

import functools

import oracles
import pytest
from adapters.small_models import images, make_vit
from torch import nn

import irpe


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
    with pytest.raises(ValueError, match=r"call irpe\.equip"):
        irpe.summary(make_vit())


def test_encodings_that_were_made_by_hand():
    attention = irpe.RPEAttention(32, 2, "product-contextual-k")
    (found,) = irpe.summary(nn.Sequential(attention)).attentions
    assert (found.name, found.grid, found.num_used_buckets) == ("0", None, None)
    assert found.num_parameters == attention.rpe.key_tables[0].numel()
    assert " ? " in str(irpe.summary(attention))
