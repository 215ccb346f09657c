"""16 bits: the error of every implementation is at most twice PyTorch's own.

What PyTorch's own error is, `own_error.py` says.
"""

import pytest
import torch
from cases import CPU_IMPLEMENTATIONS, Case
from own_error import assert_at_most_twice, pytorchs_own
from pairs import all_pairs, text

from irpe import Clip, RPESpec

DTYPES = [torch.bfloat16, torch.float16]
CASES = all_pairs(
    impl=CPU_IMPLEMENTATIONS,
    dim=[16, 24, 32, 48, 64, 80, 96, 128],
    dtype=DTYPES,
    targets=["zero", "bias", "k", "qk", "qkv"],
)


def make_case(targets, dim, dtype):
    is_bias = targets == "bias"
    spec = RPESpec(
        "cross",
        "bias" if is_bias else "contextual",
        "k" if targets in ("bias", "zero") else targets,
        Clip(3),
    )
    case = Case(spec, (4, 11), 1, batch=4, heads=3, dim=dim, dtype=dtype, factor=3.0)
    if targets == "zero":
        case.tables = {name: [t.detach() * 0 for t in ts] for name, ts in case.tables.items()}
    for tables in case.tables.values():
        for table in tables:
            table.data /= 3 * dim**0.5  # so that the scores of both kinds are alike
            table.requires_grad_()
    return case


@pytest.mark.parametrize("factors", CASES, ids=text)
def test_error_is_at_most_twice_pytorchs_own(factors):
    case = make_case(factors["targets"], factors["dim"], factors["dtype"])
    exact = case.in_float64().output_and_gradients("reference")
    own, found = pytorchs_own(case), case.output_and_gradients(factors["impl"])
    assert found[0].dtype == case.dtype
    assert_at_most_twice(found, own, exact)


@pytest.mark.parametrize("impl", CPU_IMPLEMENTATIONS)
def test_float32_is_as_good_as_the_reference_in_float32(impl):
    case = Case(RPESpec("cross", targets="qkv", index=Clip(3)), (7, 28), 1, dtype=torch.float32)
    exact = case.in_float64().output_and_gradients("reference")
    plain, found = case.output_and_gradients("reference"), case.output_and_gradients(impl)
    for e, p, f in zip(exact, plain, found, strict=True):
        allowed = 2 * (p - e).abs().max() + 4 * torch.finfo(torch.float32).eps * e.abs().max()
        assert (f - e).abs().max() <= allowed
