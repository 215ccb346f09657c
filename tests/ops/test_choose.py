"""Which implementation "auto" stands for, and what a refusal says."""

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
    explain,
)
from irpe.ops import choose
from irpe.ops.checks import check_call
from irpe.ops.choose import IMPLEMENTATIONS
from irpe.ops.impl import triton
from irpe.ops.proof.decide import Candidate, Prover
from irpe.ops.proof.signature import signature_of
from irpe.ops.proof.verdicts import Record, Verdict, VerdictFile


def explained(case, **arguments):
    return explain(case.q, case.k, case.v, case.maps, **case.tables, **arguments)


OPTIONS = {
    "dropout": {"dropout_p": 0.1},
    "scale": {"scale": 0.5},
    "mask": {"attn_mask": torch.zeros(57, 57, dtype=torch.float64, requires_grad=True)},
}


@pytest.mark.parametrize("option", [None, *OPTIONS])
@pytest.mark.parametrize("targets", ["bias", "k", "qkv"])
@pytest.mark.parametrize("method", ["product", "cross"])
@pytest.mark.parametrize("index", [Clip(1), Clip(9)])  # 9: more rows than keys
def test_fast_takes_every_call_on_the_cpu(method, targets, index, option):
    is_bias = targets == "bias"
    spec = RPESpec(method, "bias" if is_bias else "contextual", "k" if is_bias else targets, index)
    case = Case(spec, (7, 8))
    assert explained(case, **OPTIONS.get(option, {})).name == "fast"
    case.maps = [
        BucketMap(torch.stack([m.ids] * 2), m.num_buckets) for m in case.maps
    ]  # of each image
    assert explained(case, **OPTIONS.get(option, {})).name == "fast"


def test_the_explanation_has_a_reason_for_each_implementation():
    case = Case(RPESpec(targets="k", index=Clip(1)), (7, 8))
    found = explained(case)
    assert {found.name, *found.others} == set(IMPLEMENTATIONS)
    printed = str(found).splitlines()
    assert printed[0].startswith("fast: ")
    assert printed[1].startswith("  not reference: ")
    with pytest.raises(TypeError, match="impl"):
        explained(case, impl="plain")


def test_modules_take_an_implementation_and_say_what_they_take(monkeypatch):
    encoding = RelativePositionEncoding("product-contextual-k", 2, 4, 1, impl="plain")
    q = torch.randn(1, 2, 57, 4, dtype=torch.float64)
    assert encoding.explain(q, q, q, grid=(7, 8)).name == "fast"  # what "auto" would take
    called = []
    monkeypatch.setattr(IMPLEMENTATIONS["plain"], "attention", lambda call: called.append(call))
    encoding(q, q, q, grid=(7, 8))
    assert len(called) == 1
    encoding(q, q, q, grid=(7, 8), impl="fast")
    assert len(called) == 1
    assert "impl='plain'" in repr(encoding)
    assert RPEAttention(8, 2, "product-contextual-k", impl="fast").rpe.impl == "fast"
    with pytest.raises(ValueError, match="impl 'fused' is not one of auto, reference"):
        RelativePositionEncoding("product-contextual-k", 2, 4, impl="fused")


def fake_cuda_call(mode, shape, dtype, dropout_p=0.0):
    """A call on cuda:0 of tensors without values."""

    def fake(*sizes, dtype=dtype):
        return FakeTensor(mode, torch.empty(sizes, dtype=dtype, device="meta"), "cuda:0")

    tokens, dim = shape[2:]
    q, k, v = (fake(*shape) for _ in range(3))
    maps = [BucketMap.from_compact(fake(tokens, tokens, dtype=torch.uint8), fake(50), 50)]
    tables = [fake(1, 50, dim)]
    return check_call(q, k, v, maps, key_tables=tables, dropout_p=dropout_p)


@pytest.mark.parametrize("has_verdict", [False, True])
def test_gpus_take_what_is_proved_there(has_verdict, monkeypatch, tmp_path):
    """Nothing can run on tensors without values: what is known is used, else fast."""
    monkeypatch.setenv("IRPE_CACHE", str(tmp_path))
    prover = Prover([Candidate("Right", "planted:Right")], Candidate("fast", "irpe.ops.impl.fast"))
    with FakeTensorMode() as mode:
        call = fake_cuda_call(mode, (64, 6, 197, 64), torch.float16)
        if has_verdict:
            record = Record({"Right": Verdict("", 0.7, "output", "2026-01-01 12:00")})
            VerdictFile(tmp_path).add({str(signature_of(call)): record})
        name, _ = choose.choose(call, prover)
        found = choose.explain_choice(call, prover)
    assert name == found.name == ("Right" if has_verdict else "fast")
    if has_verdict:
        assert "proved on cuda, 2026-01-01 12:00: at most 0.70 times PyTorch's own" in found.reason


def test_the_cpu_never_asks_for_proofs(monkeypatch):
    def never(*_):
        raise AssertionError("asked")

    monkeypatch.setattr(Prover, "choose", never)
    monkeypatch.setattr(triton, "_what_is_missing", lambda *_: None)
    case = Case(RPESpec(targets="k", index=Clip(1)), (7, 8), dtype=torch.float32)
    assert explained(case).name in ("native", "fast")


@pytest.mark.parametrize("name", CPU_IMPLEMENTATIONS)
def test_an_explicit_request_is_used(name, monkeypatch):
    called = []
    monkeypatch.setattr(IMPLEMENTATIONS[name], "attention", lambda call: called.append(name))
    Case(RPESpec("cross", index=Clip(1)), (3, 5)).attention(name)
    assert called == [name]
