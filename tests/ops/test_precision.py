"""16 bits: the error of every implementation is at most twice PyTorch's own.

PyTorch's own error is that of `scaled_dot_product_attention` in the dtype, with the exact b_ij
times the scale, rounded to the dtype, as its mask; for value tables, of its weights times v + r.
"""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from cases import Case
from pairs import all_pairs, text

from irpe import Clip, RPESpec
from irpe.ops.choose import IMPLEMENTATIONS
from irpe.ops.impl.reference import _rows_of_pairs

DTYPES = [torch.bfloat16, torch.float16]
CASES = all_pairs(
    impl=list(IMPLEMENTATIONS),
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


def pytorchs_own(case):
    """Returns the output and the gradients of PyTorch in the dtype of the case."""
    scale, dtype = case.dim**-0.5, case.dtype
    mask = None
    if any(t.any() for ts in case.tables.values() for t in ts):
        wide = case.tables
        b = torch.zeros((), dtype=torch.float64)
        for name, tokens, sum_of in (
            ("key_tables", case.q, "bhid,bhijd->bhij"),
            ("query_tables", case.k, "bhjd,bhijd->bhij"),
        ):
            for table, bucket_map in zip(wide.get(name, []), case.maps, strict=False):
                r = _rows_of_pairs(table.double(), bucket_map)
                b = b + torch.einsum(sum_of, tokens.double(), r)
        for table, bucket_map in zip(wide.get("bias_tables", []), case.maps, strict=False):
            b = b + _rows_of_pairs(table.double(), bucket_map)
        mask = (b * scale).to(dtype)
    if "value_tables" not in case.tables:
        out = F.scaled_dot_product_attention(case.q, case.k, case.v, mask)
    else:
        tokens = case.q.shape[2]
        one_hot = torch.eye(tokens, dtype=dtype).expand(case.batch, case.heads, -1, -1)
        weights = F.scaled_dot_product_attention(case.q, case.k, one_hot, mask)
        values = case.v.unsqueeze(2)
        for table, bucket_map in zip(case.tables["value_tables"], case.maps, strict=True):
            values = values + _rows_of_pairs(table, bucket_map)
        out = torch.einsum("bhij,bhijd->bhid", weights, values)
    return [out, *torch.autograd.grad(out, case.leaves(), case.grad_out, allow_unused=True)]


@pytest.mark.parametrize("factors", CASES, ids=text)
def test_error_is_at_most_twice_pytorchs_own(factors):
    case = make_case(factors["targets"], factors["dim"], factors["dtype"])
    exact = case.in_float64().output_and_gradients("reference")
    own, found = pytorchs_own(case), case.output_and_gradients(factors["impl"])
    assert found[0].dtype == case.dtype
    for e, o, f in zip(exact, own, found, strict=True):
        if o is None:  # the gradient of tables that PyTorch has not got
            continue
        assert f.isfinite().all()
        assert (f - e).abs().max() <= 2 * (o - e).abs().max()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_float32_is_as_good_as_the_reference_in_float32(impl):
    case = Case(RPESpec("cross", targets="qkv", index=Clip(3)), (7, 28), 1, dtype=torch.float32)
    exact = case.in_float64().output_and_gradients("reference")
    plain, found = case.output_and_gradients("reference"), case.output_and_gradients(impl)
    for e, p, f in zip(exact, plain, found, strict=True):
        allowed = 2 * (p - e).abs().max() + 4 * torch.finfo(torch.float32).eps * e.abs().max()
        assert (f - e).abs().max() <= allowed
