"""Which implementation "auto" stands for, and what a refusal says."""

import pytest
import torch
from cases import Case

from irpe import BucketMap, Clip, RelativePositionEncoding, RPEAttention, RPESpec, explain
from irpe.ops.choose import IMPLEMENTATIONS
from irpe.ops.impl.blockwise.schedule import schedule_of


def explained(case, **arguments):
    return explain(case.q, case.k, case.v, case.maps, **case.tables, **arguments)


@pytest.mark.parametrize(
    ("method", "targets", "needs_grad", "blocks"),
    [
        ("product", "k", True, 2),
        ("product", "qkv", False, 2),
        ("product", "k", False, 8),
        ("cross", "k", True, 1),
        ("cross", "k", False, 0.25),
    ],
)
def test_small_calls_are_whole_and_large_ones_blockwise(method, targets, needs_grad, blocks):
    most = int(blocks * schedule_of(torch.device("cpu")).weights)
    for images, name in [(most // (2 * 57**2), "whole"), (most // (2 * 57**2) + 1, "blockwise")]:
        case = Case(RPESpec(method, targets=targets, index=Clip(1)), (7, 8))
        case.q, case.k, case.v = (
            x[:1].expand(images, -1, -1, -1) for x in (case.q, case.k, case.v)
        )
        with torch.set_grad_enabled(needs_grad):
            assert explained(case).name == name


def test_what_whole_does_not_do_is_blockwise():
    case = Case(RPESpec(targets="k", index=Clip(1)), (7, 8))
    assert explained(case, dropout_p=0.1).name == "blockwise"
    many_rows = Case(RPESpec(targets="k", index=Clip(9)), (3, 5))
    assert explained(many_rows).name == "blockwise"
    assert "46 rows are in use for 16 keys" in explained(many_rows).others["whole"]


def test_maps_of_each_image_are_whole_or_plain():
    case = Case(RPESpec(targets="k", index=Clip(1)), (7, 8))
    case.maps = [BucketMap(torch.stack([case.maps[0].ids] * 2), 10)]
    assert explained(case).name == "whole"
    assert explained(case, dropout_p=0.1).name == "plain"


def test_the_explanation_has_a_reason_for_each_implementation():
    case = Case(RPESpec(targets="k", index=Clip(1)), (7, 8))
    found = explained(case)
    assert {found.name, *found.others} == set(IMPLEMENTATIONS)
    printed = str(found).splitlines()
    assert printed[0] == "whole: its pairs are few enough to be computed at once"
    assert "  not folded: it takes maps that depend on one of several axes each" in printed[3]
    with pytest.raises(TypeError, match="impl: not an argument"):
        explained(case, impl="plain")


def test_modules_take_an_implementation_and_say_what_they_take(monkeypatch):
    encoding = RelativePositionEncoding("product-contextual-k", 2, 4, 1, impl="plain")
    q = torch.randn(1, 2, 57, 4)
    assert encoding.explain(q, q, q, grid=(7, 8)).name == "whole"  # what "auto" would take
    called = []
    monkeypatch.setattr(IMPLEMENTATIONS["plain"], "attention", lambda call: called.append(call))
    encoding(q, q, q, grid=(7, 8))
    assert len(called) == 1
    encoding(q, q, q, grid=(7, 8), impl="whole")
    assert len(called) == 1
    assert "impl='plain'" in repr(encoding)
    assert RPEAttention(8, 2, "product-contextual-k", impl="whole").rpe.impl == "whole"
    with pytest.raises(ValueError, match="impl 'fused' is not one of auto, reference"):
        RelativePositionEncoding("product-contextual-k", 2, 4, impl="fused")


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_explicit_request_is_used(name, monkeypatch):
    called = []
    monkeypatch.setattr(IMPLEMENTATIONS[name], "attention", lambda call: called.append(name))
    Case(RPESpec("cross", index=Clip(1)), (3, 5)).attention(name)
    assert called == [name]
