"""The axes of a grid as head dimensions: PyTorch's own attention computes them."""

import pytest
import torch
from cases import Case, assert_all_close
from signatures import CROSS
from torch.nn.attention import SDPBackend, sdpa_kernel

from irpe import Clip, RPESpec, UserError
from irpe.ops.impl import folded
from irpe.ops.proof.judge import judge
from irpe.ops.proof.problem import small_problems

CPU = torch.device("cpu")
CHANGES = [
    {},
    {"query": "heads", "key": "heads", "value": "heads", "dim": 24},
    {"value": "shared", "key": ""},
    {"training": False, "layout": "tokens first"},
    {"key": "shared 10+6"},
    {"key": "shared 10+6", "value": "heads 10+6"},
    {"query": "shared", "rotated": "q and k"},
    {"mask": "boolean b1qk"},
    {"mask": "learned bhqk", "alignment": "aligned"},
    {"value": "heads", "dropout": "dropout"},
]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_errors_are_at_most_twice_pytorchs_own(change, dtype):
    """With PyTorch's kernel of operators: the CPU's fused one gives no mask a gradient."""
    signature = CROSS._replace(dtype=dtype, **change)
    assert folded.supports(small_problems(signature, CPU)[0].call()) is None
    with sdpa_kernel(SDPBackend.MATH):
        assert judge(folded, signature, CPU).error == ""


@pytest.mark.parametrize("prefix", [0, 1, 5])
@pytest.mark.parametrize("grid", [(1, 1), (1, 9), (3, 5), (7, 28), (2, 3, 4)])
def test_it_equals_the_reference_on_every_grid(grid, prefix):
    for targets in ("k", "qkv"):
        case = Case(RPESpec("cross", targets=targets, index=Clip(2)), grid, prefix)
        found, expected = map(case.output_and_gradients, ("folded", "reference"))
        assert_all_close(found, expected, 1e-10)


def test_what_is_refused_says_why():
    product = Case(RPESpec("product", index=Clip(1)), (3, 5))
    with pytest.raises(UserError, match="method 'cross'"):
        product.attention("folded")
    bias = Case(RPESpec("cross", "bias", index=Clip(1)), (3, 5))
    with pytest.raises(UserError, match="not of scalars"):
        bias.attention("folded")
    wide = Case(RPESpec("cross", index=Clip(1)), (70, 70), 0, 1, 1, 128)
    with pytest.raises(UserError, match="up to 256 dimensions with those of the axes, not 272"):
        wide.attention("folded")
