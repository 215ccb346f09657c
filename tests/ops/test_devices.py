"""What runs on a GPU, as far as it can be seen without one.

Fake tensors over meta tensors claim to be on cuda:0. They run an implementation's own forward and
backward functions, which fail on a tensor that was left on the CPU; autograd cannot run there.
"""

from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from irpe import bucket_maps
from irpe.ops.checks import check_call
from irpe.ops.impl.fast import FastPasses
from irpe.ops.impl.fast.slices import bounds_of, keeps_weights, make_slices

CUDA = torch.device("cuda:0")


class Count(TorchDispatchMode):
    """Counts the operators that compute something."""

    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        name = operator.name()
        is_question = name in ("prim::device", "aten::promote_types")
        is_allocation = name.partition(".")[0].endswith(("empty", "empty_like", "empty_strided"))
        if not (operator.is_view or is_question or is_allocation or "_unsafe_view" in name):
            self.names[name] += 1
        return operator(*args, **(kwargs or {}))


def make_call(mode, spec, shape, dtype=torch.float32, grid=(14, 14), prefix=1):
    """A call on cuda:0."""
    batch, heads, tokens, dim = shape

    def fake(*sizes, dtype=dtype):
        return FakeTensor(mode, torch.empty(sizes, dtype=dtype, device="meta"), CUDA)

    maps = [
        m.with_tensors(lambda x: fake(*x.shape, dtype=x.dtype))
        for m in bucket_maps(spec, grid, prefix)
    ]
    targets = "" if "bias" in spec else spec.partition("@")[0].rpartition("-")[2]
    tables = {
        name: [fake(1, m.num_buckets, dim) for m in maps]
        for name, target in (("query_tables", "q"), ("key_tables", "k"), ("value_tables", "v"))
        if target in targets
    }
    if not targets:
        tables = {"bias_tables": [fake(1, m.num_buckets) for m in maps]}
    return check_call(*(fake(batch, heads, tokens, dim) for _ in range(3)), maps, **tables)


def training_step(passes, spec, shape, **arguments):
    """Runs both passes on fake tensors; returns the operators that they took."""
    mode = FakeTensorMode()
    with mode:
        call = make_call(mode, spec, shape, **arguments)
    with mode, Count() as count:
        out, kept = passes.forward(call, keeps_weights(call))
        gradients = passes.backward(call, torch.empty_like(out), kept, False)
    results = [out, *gradients[:3], *gradients.tables]
    assert all(x.device == CUDA for x in results)
    assert all(x.dtype == call.q.dtype for x in results)
    return count.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec",
    ["product-contextual-qkv", "cross-contextual-qkv", "product-bias-k", "product-contextual-qk@9"],
)
def test_no_tensor_is_left_on_the_cpu(spec, dtype):
    training_step(FastPasses(), spec, (2, 3, 197, 16), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_stay_16_bits_wide_and_give_float32(dtype):
    names = training_step(FastPasses(), "product-contextual-k", (2, 3, 197, 16), dtype=dtype)
    assert names["aten::bmm.dtype"] == 6  # two products forward, four backward
    assert not names["aten::bmm"] + names["aten::baddbmm.out"]


@pytest.mark.parametrize(
    ("spec", "shape", "most"),
    [
        ("product-contextual-k", (64, 6, 197, 64), 60),
        ("product-contextual-qkv", (64, 6, 197, 64), 120),
        ("product-contextual-k", (2, 6, 4096, 64), 400),
        ("product-contextual-qkv", (2, 6, 4096, 64), 400),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_takes_few_operators(spec, shape, most, dtype):
    grid, prefix = ((64, 64), 0) if shape[2] == 4096 else ((14, 14), 1)
    names = training_step(FastPasses(), spec, shape, dtype=dtype, grid=grid, prefix=prefix)
    assert sum(names.values()) <= most, names


def test_slices_off_the_cpu_are_bounded_by_memory():
    mode = FakeTensorMode()
    with mode:
        call = make_call(mode, "product-contextual-k", (2, 6, 4096, 64), grid=(64, 64), prefix=0)
    slices = make_slices(call, True)
    assert len(slices) == 4
    most = bounds_of(CUDA).weights
    for images, heads, queries in slices:
        sizes = [len(range(*s.indices(n))) for s, n in ((images, 2), (heads, 6), (queries, 4096))]
        assert sizes[0] * sizes[1] * sizes[2] * 4096 <= most
