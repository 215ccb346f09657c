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
from irpe.ops.differentiable import CompactCall
from irpe.ops.impl.blockwise.passes import BlockPasses
from irpe.ops.impl.blockwise.schedule import make_blocks, schedule_of
from irpe.ops.impl.blockwise.terms import Block, BucketTerm, PairTerm, QueryAxisTerm
from irpe.ops.impl.triton.operator import TritonPasses
from irpe.ops.impl.whole import WholePasses
from irpe.ops.key_patterns import key_pattern, query_axis

CUDA = torch.device("cuda:0")
EVERYTHING = Block(slice(None), slice(None), slice(None))


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
    """A call on cuda:0, without a grid: patterns are found in values, which these have not."""
    batch, heads, tokens, dim = shape

    def fake(*sizes, dtype=dtype):
        return FakeTensor(mode, torch.empty(sizes, dtype=dtype, device="meta"), CUDA)

    maps = bucket_maps(spec, grid, prefix)
    rows = [m.num_used_buckets for m in maps]
    targets = "" if "bias" in spec else spec.partition("@")[0].rpartition("-")[2]

    def tables(letter):
        return [fake(1, count, dim) for count in rows] if letter in targets else []

    return CompactCall(
        *(fake(batch, heads, tokens, dim) for _ in range(3)),
        None,
        None,
        None,
        tables("q"),
        tables("k"),
        tables("v"),
        [] if targets else [fake(1, count) for count in rows],
        ids=[fake(tokens, tokens, dtype=m.compact_ids.dtype) for m in maps],
        grid=[],
        scale=0.125,
        dropout_p=0.0,
        seed=None,
    )


class Blockwise:
    """The passes inside the operator."""

    @staticmethod
    def forward(call, keeps):
        makes_weights = keeps or bool(call.value_tables)
        return BlockPasses(call, make_blocks(call, makes_weights)).forward(keeps)

    @staticmethod
    def backward(call, grad, kept, mask_needs_grad):
        return BlockPasses(call, make_blocks(call, True)).backward(grad, kept, mask_needs_grad)


def training_step(passes, spec, shape, keeps, **arguments):
    """Runs both passes on fake tensors; returns the operators that they took."""
    mode = FakeTensorMode()
    call = make_call(mode, spec, shape, **arguments)
    with mode, Count() as count:
        out, kept = passes.forward(call, keeps)
        gradients = passes.backward(call, torch.empty_like(out), kept, False)
    results = [out, *gradients[:3], *gradients.tables]
    assert all(x.device == CUDA for x in results)
    assert all(x.dtype == call.q.dtype for x in results)
    return count.names


@pytest.mark.parametrize("passes", [WholePasses, Blockwise, TritonPasses])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "spec",
    ["product-contextual-qkv", "cross-contextual-k", "product-bias-k"],
)
def test_no_tensor_is_left_on_the_cpu(passes, spec, dtype):
    training_step(passes, spec, (2, 3, 197, 16), keeps=True, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_products_stay_16_bits_wide_and_give_float32(dtype):
    names = training_step(WholePasses, "product-contextual-k", (2, 3, 197, 16), True, dtype=dtype)
    assert names["aten::bmm.dtype"] == 6  # two products forward, four backward
    assert not names["aten::bmm"] + names["aten::baddbmm.out"]


@pytest.mark.parametrize(
    ("passes", "spec", "shape", "most"),
    [
        (WholePasses, "product-contextual-k", (64, 6, 197, 64), 60),
        (WholePasses, "product-contextual-qkv", (64, 6, 197, 64), 120),
        (Blockwise, "product-contextual-k", (64, 6, 197, 64), 60),
        (Blockwise, "product-contextual-qkv", (64, 6, 197, 64), 120),
        (Blockwise, "product-contextual-k", (2, 6, 4096, 64), 400),
        (Blockwise, "product-contextual-qkv", (2, 6, 4096, 64), 400),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_takes_few_operators(passes, spec, shape, most, dtype):
    grid, prefix = ((64, 64), 0) if shape[2] == 4096 else ((14, 14), 1)
    keeps = shape[2] <= 16 * shape[3]
    names = training_step(passes, spec, shape, keeps, dtype=dtype, grid=grid, prefix=prefix)
    assert sum(names.values()) <= most, names


def test_blocks_off_the_cpu_are_bounded_by_memory():
    mode = FakeTensorMode()
    call = make_call(mode, "product-contextual-k", (2, 6, 4096, 64), grid=(64, 64), prefix=0)
    blocks = make_blocks(call, True)
    assert len(blocks) == 4
    most = schedule_of(CUDA).weights
    for batch, heads, queries in blocks:
        sizes = [len(range(*s.indices(n))) for s, n in ((batch, 2), (heads, 6), (queries, 4096))]
        assert sizes[0] * sizes[1] * sizes[2] * 4096 <= most


@pytest.mark.parametrize(
    ("spec", "grid", "prefix"),
    [("cross-contextual-k@2", (5, 6), 1), ("product-contextual-k@clip1", (24, 16), 2)],
)
def test_patterns_and_terms_stay_on_their_device(spec, grid, prefix):
    mode, (bucket_map, *_) = FakeTensorMode(), bucket_maps(spec, grid, prefix)
    ids, tokens = bucket_map.compact_ids, bucket_map.compact_ids.shape[0]
    pattern, of_queries = key_pattern(ids, grid), query_axis(ids, grid)

    def fake(tensor):
        return FakeTensor(mode, tensor.to("meta"), CUDA)

    def moved(found):
        is_rows = hasattr(found, "row_index")
        rest = {"row_index": fake(found.row_index)} if is_rows else {}
        return found._replace(ids=fake(found.ids), **rest)

    x, scores = fake(torch.empty(2, 3, tokens, 4)), fake(torch.empty(2, 3, tokens, tokens))
    table = fake(torch.empty(1, bucket_map.num_used_buckets, 4))
    pattern, ids, of_queries = moved(pattern), fake(ids), of_queries and moved(of_queries)
    with mode:
        terms = [BucketTerm(x, table, pattern, 0.5), PairTerm(x, table, ids, 0.5)]
        if of_queries is not None:
            terms.append(QueryAxisTerm(x, table, of_queries, 0.5))
        for term in terms:
            term.write_products(EVERYTHING, scores)
            term.add_products(EVERYTHING, scores)
            term.collect(EVERYTHING, scores)
            assert term.combination().device == term.gradient().device == CUDA
