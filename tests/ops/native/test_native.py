"""The compiled kernels: equal to the reference, safe, the same bits for one number of threads."""

import math
import multiprocessing
import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cases import Case, assert_all_close
from hostile import native as random_calls
from hostile.cases import run
from pairs import all_pairs, text
from torch.utils.flop_counter import FlopCounterMode

import irpe
from irpe import BucketMap, Clip, Piecewise, RPESpec, rpe_attention
from irpe.ops.impl.native import library
from irpe.ops.impl.native.library import Inputs

pytestmark = pytest.mark.skipif(
    library.why_unavailable() is not None, reason=f"native: {library.why_unavailable()}"
)
GRIDS = [((3, 5), 1), ((2, 3, 4), 0), ((1, 9), 5), ((12, 16), 0), ((1, 1), 0), ((7, 28), 2)]
PAIRS = all_pairs(
    method=["product", "cross", "euclidean", "quantization"],
    targets=["bias", "q", "k", "v", "qk", "qv", "kv", "qkv"],
    grid=GRIDS,
    index=[Clip(1), Clip(9), Piecewise.from_ratio(1.9)],
    shared=[True, False],
    mask=[None, "boolean", "padding", "additive"],
    batch=[1, 2, 0],
    layout=["rotated", "strided", ""],
    dim=[1, 8, 13, 16, 24, 64],
    threads=[1, 2, 3],
)


@pytest.fixture
def threads(monkeypatch):
    """A function that sets how many threads work on a call of any size."""
    before = torch.get_num_threads()
    monkeypatch.setattr(library, "WORK_OF_A_THREAD", 1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


def make_case(targets="qkv", grid=(7, 9), prefix=1, index=None, method="product", **options):
    mode = "bias" if targets == "bias" else "contextual"
    targets = "k" if targets == "bias" else targets
    shared = options.pop("shared", True)
    spec = RPESpec(method, mode, targets, index or Piecewise.from_ratio(1.9), shared)
    case = Case(spec, grid, prefix, **{"dtype": torch.float32, **options})
    if case.mask == "additive":
        case.attn_mask.requires_grad_(False)
    return case


def results(case, impl):
    """The output and all gradients; a mask has none."""
    out = case.attention(impl)
    leaves = [leaf for leaf in case.leaves() if leaf.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, case.grad_out.to(out.dtype), allow_unused=True)]


def expected_of(case):
    """What the reference gives in float64."""
    exact = case.in_float64()
    mask = case.attn_mask
    exact.attn_mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return [x if x is None else x.float() for x in results(exact, "reference")]


@pytest.mark.parametrize("factors", PAIRS, ids=text)
def test_outputs_and_gradients_equal_the_reference(factors, threads):
    f = dict(factors)
    grid, prefix = f.pop("grid")
    threads(f.pop("threads"))
    layout = f.pop("layout")
    case = make_case(
        grid=grid,
        prefix=prefix,
        is_rotated=layout == "rotated",
        is_strided=layout == "strided",
        **f,
    )
    expected = expected_of(case)
    assert_all_close(results(case, "native"), expected, 5e-5)
    with torch.no_grad():
        assert_all_close([case.attention("native")], expected[:1], 5e-5)


@pytest.mark.parametrize("targets", ["bias", "qkv"])
@pytest.mark.parametrize("mask", [None, "boolean", "additive"])
def test_several_blocks_of_keys(targets, mask, threads):
    """More keys than a block: the softmax goes on where the block before ended."""
    threads(2)
    case = make_case(targets, grid=(24, 23), batch=1, dim=8, mask=mask, factor=0.5)
    assert_all_close(results(case, "native"), expected_of(case), 5e-5)


def test_random_calls():
    """A part of the campaign in tests/hostile: any sizes, maps, tables, masks and layouts."""
    count = run(random_calls.cases(1, 150))
    assert count.cases == 150
    assert not count.failures, "\n".join(count.failures[:5])


def test_the_random_calls_find_a_defect(monkeypatch):
    forward = library.forward

    def without_bias(x):
        return forward(x._replace(bias=None if x.bias is None else 0 * x.bias))

    monkeypatch.setattr(library, "forward", without_bias)
    assert run(random_calls.cases(1, 20)).failures


def test_more_rows_than_a_vector_has_places_and_more_than_keys():
    for index in (Clip(5), Clip(9)):
        case = make_case("qkv", grid=(10, 10), index=index, batch=1)
        assert case.maps[0].num_used_buckets > 64
        assert_all_close(results(case, "native"), expected_of(case), 5e-5)


def test_queries_whose_keys_are_all_masked_get_zeros():
    for value in (False, -math.inf):
        case = make_case("qkv", mask="boolean")
        if value is not False:
            case.attn_mask = torch.zeros(case.attn_mask.shape).masked_fill(~case.attn_mask, value)
        case.attn_mask[1] = value
        found = results(case, "native")
        assert not found[0][1].any()
        assert all(x.isfinite().all() for x in found)
        assert_all_close(found, expected_of(case), 5e-5)


def test_the_lowest_number_masks_as_in_pytorch():
    """Where it masks all keys, they have equal weights."""
    case = make_case("k", grid=(4, 5), mask="boolean")
    lowest = torch.finfo(torch.float32).min
    case.attn_mask = torch.zeros(case.attn_mask.shape).masked_fill(~case.attn_mask, lowest)
    case.attn_mask[1] = lowest
    actual, expected = case.attention("native"), case.attention("reference")
    assert expected[1].any()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_and_infinity_go_where_the_reference_has_them(name, value):
    case = make_case("qkv", grid=(3, 6), batch=1)
    with torch.no_grad():
        getattr(case, name)[0, 0, 3, 2] = value
        actual, expected = case.attention("native"), case.attention("reference")
    assert torch.equal(actual.isfinite(), expected.isfinite())
    assert torch.equal(actual.isnan(), expected.isnan())


def test_a_boolean_mask_removes_nan():
    case = make_case("k", grid=(3, 6), batch=1, mask="padding")
    case.attn_mask[..., 5], case.attn_mask[..., 6] = False, True
    with torch.no_grad():
        case.k[:, :, 5] = math.nan
        actual, expected = case.attention("native"), case.attention("reference")
    assert actual.isfinite().all()
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_no_keys_give_zeros():
    bucket_map = BucketMap(torch.zeros(3, 0, dtype=torch.uint8), 1)
    q, k = torch.randn(1, 2, 3, 4, requires_grad=True), torch.randn(1, 2, 0, 4, requires_grad=True)
    table = torch.randn(1, 1, 4, requires_grad=True)
    out = rpe_attention(q, k, k, [bucket_map], key_tables=[table], impl="native")
    out.sum().backward()
    assert not out.any()
    assert not any(x.grad.any() for x in (q, k, table))


@pytest.mark.parametrize("shape", [(4, 3, 50, 8), (1, 1, 200, 16), (1, 2, 600, 8)])
def test_one_number_of_threads_gives_the_same_bits(shape, threads):
    """Also where a head is divided between threads."""
    batch, heads, tokens, dim = shape
    case = make_case("qkv", grid=(2, tokens // 2), prefix=0, batch=batch, heads=heads, dim=dim)
    found = {}
    for count in (1, 2, 3, 8):
        threads(count)
        first, again = results(case, "native"), results(case, "native")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), count
        found[count] = first
    for count in (2, 3, 8):
        assert_all_close(found[count], found[1], 1e-4)


def test_torch_tells_how_many_threads(threads, monkeypatch):
    seen = []
    real = library._run

    def spy(name, x, *rest):
        seen.append(torch.get_num_threads())
        return real(name, x, *rest)

    monkeypatch.setattr(library, "_run", spy)
    for count in (1, 3):
        threads(count)
        make_case().attention("native")
    assert seen == [1, 3]


def test_eight_threads_of_python_at_once(threads):
    threads(2)
    cases = [make_case("qkv", grid=(5, 6 + i % 3), seed=i, shared=i % 2 == 0) for i in range(24)]
    expected = [results(case, "native") for case in cases]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda case: results(case, "native"), cases))
    for actual, before in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(actual, before, strict=True))


def _norm(queue, case):
    torch.set_num_threads(1)
    with torch.no_grad():
        queue.put(float(case.attention("native").norm()))


def test_a_forked_process():
    case = make_case("qkv")
    with torch.no_grad():
        expected = float(case.attention("native").norm())
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_norm, args=(queue, case))
    process.start()
    assert queue.get(timeout=60) == expected
    process.join()
    assert process.exitcode == 0


def test_a_compiler_sees_one_operator():
    torch.compiler.reset()
    graphs = []

    def record(graph, inputs):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    case = make_case("qkv")
    compiled = torch.compile(lambda: case.attention("auto"), backend=record, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(), case.attention("native"))
    (targets,) = graphs
    assert torch.ops.irpe.native.default in targets
    torch.library.opcheck(
        torch.ops.irpe.native.default,
        _operator_arguments(case),
        test_utils=["test_schema", "test_faketensor"],
    )


def _operator_arguments(case):
    q, k, v = (x.detach() for x in (case.q, case.k, case.v))
    names = ("query_tables", "key_tables", "value_tables", "bias_tables")
    (bucket_map,) = case.maps
    tables = [
        [table.detach()[:, bucket_map.used_rows] for table in case.tables.get(name, ())]
        for name in names
    ]
    ids = [m.compact_ids for m in case.maps]
    return (q, k, v, None, None, None, *tables, ids, [0], 0.5, 0.0, None, True)


def test_compiled_gradients():
    torch.compiler.reset()
    case = make_case("qkv")
    compiled = torch.compile(case.attention, backend="aot_eager", fullgraph=True)
    leaves = case.leaves()
    found = torch.autograd.grad(compiled("native"), leaves, case.grad_out)
    assert_all_close(found, expected_of(case)[1:], 5e-5)


def test_an_exported_program_has_operators_of_pytorch():
    attention = irpe.RPEAttention(16, num_heads=2, spec="product-contextual-qkv").eval()
    exported = torch.export.export(attention, (torch.randn(1, 15, 16),), {"grid": (3, 5)})
    names = {str(node.target) for node in exported.graph.nodes}
    assert not any(name.startswith("irpe") for name in names)


def test_operations_are_counted():
    """Where a counter looks on, the products are those of PyTorch; a compiled one has a formula."""
    case, tokens = make_case("qkv", (7, 8), 1, batch=2, heads=3, dim=8), 2 * 3 * 57 * 8
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        case.attention("auto")
    assert counter.get_total_flops() == 2 * tokens * (2 * 57 + 150)
    with FlopCounterMode(display=False) as counter:
        arguments = _operator_arguments(case)
        out, *kept = torch.ops.irpe.native.default(*arguments)
    assert counter.get_total_flops() == 2 * tokens * (2 * 57 + 150)
    with FlopCounterMode(display=False) as counter:
        torch.ops.irpe.native_backward.default(out, [out, *kept], False, *arguments[:-1])
    assert counter.get_total_flops() == 2 * tokens * (5 * 57 + 8 * 50)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"dtype": torch.bfloat16}, "bfloat16"),
        ({"dropout_p": 0.5}, "drop"),
        ({"mask": "learned"}, "gradient"),
    ],
    ids=str,
)
def test_what_goes_elsewhere_says_why(change, reason):
    arguments = {"dropout_p": change.pop("dropout_p")} if "dropout_p" in change else {}
    is_learned = change.get("mask") == "learned"
    case = make_case("k", **(change | ({"mask": "additive"} if is_learned else {})))
    if is_learned:
        case.attn_mask.requires_grad_()
    with pytest.raises(irpe.UserError, match=reason):
        case.attention("native", **arguments)
    assert case.attention("auto", **arguments).dtype == case.q.dtype


def test_maps_of_each_image_and_very_many_rows_go_elsewhere():
    q = torch.randn(2, 1, 70, 4)
    of_each = BucketMap(torch.zeros(2, 70, 70, dtype=torch.long), 3)
    many = BucketMap(torch.arange(70 * 1000).view(70, 1000), 70_000)
    for bucket_map, k in ((of_each, q), (many, torch.randn(2, 1, 1000, 4))):
        table = torch.randn(1, bucket_map.num_buckets, 4)
        expected = rpe_attention(q, k, k, [bucket_map], key_tables=[table], impl="reference")
        with pytest.raises(irpe.UserError, match=r"maps differ|70,000 table rows"):
            rpe_attention(q, k, k, [bucket_map], key_tables=[table], impl="native")
        found = rpe_attention(q, k, k, [bucket_map], key_tables=[table])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


GOOD = {
    **{name: torch.randn(2, 3, 5, 8) for name in ("q", "k", "v")},
    "table_q": None,
    "table_k": None,
    **{name: torch.randn(3, 4, 8) for name in ("query", "key", "value")},
    "bias": torch.randn(1, 4),
    "mask": torch.zeros(2, 1, 1, 5),
    "ids": [torch.zeros(5, 5, dtype=torch.uint8)],
    "rows": [4],
    "scale": 0.5,
}
BAD = {
    "too few keys": {"v": torch.randn(2, 3, 4, 8)},
    "another batch": {"k": torch.randn(1, 3, 5, 8)},
    "another dimension": {"v": torch.randn(2, 3, 5, 7)},
    "float64": {"q": torch.randn(2, 3, 5, 8).double()},
    "no values": {"k": torch.randn(2, 3, 5, 8, device="meta")},
    "sparse": {"v": torch.randn(2, 3, 5, 8).to_sparse()},
    "too few heads of a table": {"key": torch.randn(2, 4, 8)},
    "too few rows": {"value": torch.randn(3, 3, 8)},
    "a table of another dimension": {"query": torch.randn(1, 4, 7)},
    "scalars of a vector": {"bias": torch.randn(1, 4, 8)},
    "rows of no table": {"rows": [5]},
    "no map": {"ids": [], "rows": []},
    "more maps than rows": {"ids": [GOOD["ids"][0]] * 2},
    "ids of too few queries": {"ids": [torch.zeros(4, 5, dtype=torch.uint8)]},
    "ids of an image": {"ids": [torch.zeros(2, 5, 5, dtype=torch.uint8)]},
    "ids of floats": {"ids": [torch.zeros(5, 5)]},
    "ids beyond the rows": {"ids": [torch.full((5, 5), 4, dtype=torch.int16)]},
    "ids below zero": {"ids": [torch.full((5, 5), -1)]},
    "huge ids": {"ids": [torch.full((5, 5), 2**32)]},
    "ids of signed bytes below zero": {"ids": [torch.full((5, 5), -1, dtype=torch.int8)]},
    "more rows than 16 bits count": {"rows": [2**16 + 1], "bias": torch.zeros(1, 2**16 + 1)},
    "ids that were used with other sizes": {
        **{name: torch.randn(2, 3, 6, 8) for name in ("q", "k", "v")},
        "mask": None,
    },
    "a mask of another size": {"mask": torch.zeros(2, 1, 2, 5)},
    "a mask of integers": {"mask": torch.zeros(2, 1, 1, 5, dtype=torch.int32)},
    "a mask of three axes": {"mask": torch.zeros(1, 1, 5)},
    "rotated queries of another size": {"table_q": torch.randn(2, 3, 4, 8)},
}


@pytest.mark.parametrize("name", BAD)
def test_nothing_that_does_not_fit_reaches_a_kernel(name, monkeypatch):
    library.forward(Inputs(**GOOD))
    loaded, calls = library.load(), []

    class Spy:
        parallel_for = loaded.parallel_for
        irpe_make_plan, irpe_free = loaded.irpe_make_plan, loaded.irpe_free

        @staticmethod
        def irpe_forward(call):
            calls.append(call)

    monkeypatch.setattr(library, "load", lambda: Spy)
    with pytest.raises((ValueError, TypeError)):
        library.forward(Inputs(**(GOOD | BAD[name])))
    assert not calls


@pytest.mark.parametrize("name", ["out", "normalizers", "grad"])
def test_nothing_that_does_not_fit_reaches_the_backward_pass(name):
    x = Inputs(**GOOD)
    out, normalizers = library.forward(x)
    given = {"out": out, "normalizers": normalizers, "grad": torch.randn(2, 3, 5, 8)}
    library.backward(x, **given)
    with pytest.raises(ValueError, match=name):
        library.backward(x, **(given | {name: given[name][..., :4]}))


def test_gradients_that_are_expanded_or_not_dense():
    case = make_case("k")
    leaves = case.leaves()
    dense = torch.randn(case.q.shape)
    for grad in (torch.ones(()).expand(case.q.shape), dense.mT.contiguous().mT):
        found, expected = (
            torch.autograd.grad(case.attention(impl), leaves, grad)
            for impl in ("native", "reference")
        )
        assert_all_close(found, expected, 1e-4)


def test_no_memory_is_a_memory_error():
    rows, keys = 2**16, 2**25  # for whose products there would be 8 TiB
    x = Inputs(
        torch.randn(1, 1, 1, 1), torch.randn(1, 1, keys, 1), torch.randn(1, 1, keys, 1), None, None,
        torch.randn(1, rows, 1), None, None, None, None,
        [torch.zeros(1, 1, dtype=torch.uint8).expand(1, keys)], [rows], 1.0,
    )  # fmt: skip
    with pytest.raises(MemoryError, match="33,554,432 keys"):
        library.forward(x)


LIMITED = """
import resource, torch
from irpe.ops.impl.native import library
library.load()
ids = torch.randint(200, (3000, 3000), dtype=torch.uint8)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 2**24, used + 2**24))
try:
    library._make_plan(ids, 200, of_queries=False)
except MemoryError as error:
    print("MemoryError", error)
"""


def test_no_memory_for_a_plan_is_a_memory_error():
    assert resource.RLIMIT_AS
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True)
    assert done.stdout.startswith("MemoryError"), done.stderr[-2000:]


def test_a_plan_is_made_once_for_a_map_and_goes_with_it(monkeypatch):
    made = []
    real = library._make_plan
    monkeypatch.setattr(library, "_make_plan", lambda *a: made.append(1) or real(*a))
    ids = torch.randint(3, (6, 6))
    bucket_map = BucketMap(ids, 3)
    before = len(library._plans_of_ids)
    q, table = torch.randn(1, 1, 6, 4), torch.randn(1, 3, 4)
    for _ in range(3):
        rpe_attention(q, q, q, [bucket_map], key_tables=[table], impl="native")
    assert len(made) == 1
    rpe_attention(q, q, q, [bucket_map], query_tables=[table], impl="native")
    assert len(made) == 2  # query tables need a plan of their own
    assert len(library._plans_of_ids) == before + 1
    del bucket_map
    assert len(library._plans_of_ids) == before


SWITCHED_OFF = """
import irpe, torch
q = torch.randn(1, 2, 196, 32)
maps = irpe.bucket_maps("product-contextual-k", grid=(14, 14))
print(irpe.explain(q, q, q, maps, key_tables=[torch.zeros(1, 49, 32)]))
"""


def explained(**environment):
    done = subprocess.run(
        [sys.executable, "-c", SWITCHED_OFF],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        check=True,
    )
    return done.stdout


def test_it_is_taken_and_can_be_switched_off():
    assert explained().startswith("native: ")
    off = explained(IRPE_NATIVE="0")
    assert off.startswith("fast: ")
    assert "not native: the compiled kernels are switched off by IRPE_NATIVE=0" in off


def test_a_processor_without_its_vectors_goes_elsewhere():
    found = explained(ATEN_CPU_CAPABILITY="default")
    assert found.startswith("fast: ")
    assert "not native: it is compiled for AVX2 and AVX512" in found
    assert explained(ATEN_CPU_CAPABILITY="avx2").startswith("native: ")
