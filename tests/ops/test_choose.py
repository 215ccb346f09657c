"""Which implementation "auto" stands for, and what a refusal says."""

import copy

import pytest
import torch
from cases import CPU_IMPLEMENTATIONS, Case
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from irpe import (
    BucketMap,
    Clip,
    RelativePositionEncoding,
    RPEAttention,
    RPESpec,
    bucket_maps,
    explain,
)
from irpe.ops import choose
from irpe.ops.call import AttentionCall, Tables
from irpe.ops.choose import IMPLEMENTATIONS
from irpe.ops.impl import triton
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


def fake_cuda_call(mode, shape, dtype, method="product", mask=None, dropout_p=0.0):
    """A call on cuda:0 of tensors without values."""

    def fake(*sizes, dtype=dtype):
        return FakeTensor(mode, torch.empty(sizes, dtype=dtype, device="meta"), "cuda:0")

    tokens, dim = shape[2:]
    maps = []
    for bucket_map in bucket_maps(f"{method}-contextual-k", (14, 14), 1):
        moved = copy.copy(bucket_map)
        moved.compact_ids = fake(tokens, tokens, dtype=torch.uint8)
        maps.append(moved)
    q, k, v = (fake(*shape) for _ in range(3))
    tables = Tables(key=tuple(fake(1, m.num_buckets, dim) for m in maps))
    return AttentionCall(q, k, v, tuple(maps), tables, mask, dropout_p, 1.0, q, k)


@pytest.mark.parametrize(
    ("shape", "dtype", "now", "proven"),
    [
        ((64, 6, 197, 64), torch.float16, "whole", "triton"),
        ((64, 6, 197, 128), torch.bfloat16, "whole", "triton"),
        ((64, 6, 197, 64), torch.float32, "whole", "whole"),
        ((2, 6, 4096, 64), torch.float16, "blockwise", "triton"),
        ((2, 6, 4096, 64), torch.float32, "blockwise", "triton"),
        ((2, 6, 4096, 192), torch.float16, "blockwise", "blockwise"),
        ((2, 6, 4096, 64), torch.float64, "blockwise", "blockwise"),
    ],
)
def test_gpus_take_the_kernels_once_they_are_proven(shape, dtype, now, proven, monkeypatch):
    monkeypatch.setattr(triton, "_what_is_missing", lambda device, _: device != "cuda" or None)
    with FakeTensorMode() as mode:
        call = fake_cuda_call(mode, shape, dtype)
        assert choose.choose(call)[0] == now
        monkeypatch.setattr(choose, "TRITON_IS_PROVEN", True)
        assert choose.choose(call)[0] == proven
        dropped = fake_cuda_call(mode, shape, dtype, dropout_p=0.1)
        assert choose.choose(dropped)[0] == ("blockwise" if proven == "whole" else proven)


def test_rocm_takes_the_kernels_for_small_heads_or_for_memory(monkeypatch):
    monkeypatch.setattr(triton, "_what_is_missing", lambda *_: None)
    monkeypatch.setattr(choose, "TRITON_IS_PROVEN", True)
    monkeypatch.setattr(torch.version, "hip", "7.0")
    for shape, name in (
        ((64, 6, 197, 64), "triton"),
        ((64, 6, 197, 80), "whole"),
        ((2, 6, 4096, 80), "triton"),
    ):
        with FakeTensorMode() as mode:
            assert choose.choose(fake_cuda_call(mode, shape, torch.float16))[0] == name


def test_the_cpu_never_takes_the_kernels(monkeypatch):
    monkeypatch.setattr(choose, "TRITON_IS_PROVEN", True)
    monkeypatch.setattr(triton, "_what_is_missing", lambda *_: None)
    case = Case(RPESpec(targets="k", index=Clip(1)), (7, 8), dtype=torch.float32)
    assert explained(case).name == "whole"


@pytest.mark.parametrize("name", CPU_IMPLEMENTATIONS)
def test_an_explicit_request_is_used(name, monkeypatch):
    called = []
    monkeypatch.setattr(IMPLEMENTATIONS[name], "attention", lambda call: called.append(name))
    Case(RPESpec("cross", index=Clip(1)), (3, 5)).attention(name)
    assert called == [name]
