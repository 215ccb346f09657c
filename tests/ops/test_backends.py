"""Every way to compute attention equals the reference: whole tensors and all gradients."""

import oracles
import pytest
import torch
from cases import SPECS, Case

from irpe import Clip, RPESpec, automatic_impl, rpe_attention
from irpe.ops import blockwise
from irpe.ops.attention import IMPLEMENTATIONS
from irpe.ops.impl import fused

FAST = ["efficient", "fused", "fused in blocks"]
SMALL = 300  # pairs in a block
CROSS = [spec for spec in SPECS if spec.method == "cross"]


@pytest.fixture(params=FAST)
def impl(request, monkeypatch):
    """The fused backend keeps its weights, or computes them again block by block."""
    if request.param == "fused in blocks":
        monkeypatch.setattr(blockwise, "_NUMBERS_IN_A_BLOCK", SMALL)
        monkeypatch.setattr(blockwise, "_NUMBERS_IN_A_MASK", SMALL)
        monkeypatch.setattr(fused, "_keeps_weights", lambda *_: False)
    return request.param.split()[0]


def assert_all_close(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(("grid", "prefix"), [((3, 5), 1), ((4, 2, 3), 0)])
@pytest.mark.parametrize("mask", [None, "boolean", "additive"])
def test_outputs_and_gradients_equal_the_reference(impl, spec, grid, prefix, mask):
    case = Case(spec, grid, prefix, mask=mask)
    expected = case.output_and_gradients("reference")
    assert_all_close(case.output_and_gradients(impl), expected, 1e-10)


@pytest.fixture
def large_blocks(impl, monkeypatch):
    """Blocks of some queries of one head on grids of some hundred tokens."""
    if blockwise._NUMBERS_IN_A_BLOCK == SMALL:
        monkeypatch.setattr(blockwise, "_NUMBERS_IN_A_BLOCK", 50 * SMALL)
        monkeypatch.setattr(blockwise, "_NUMBERS_IN_A_MASK", 50 * SMALL)


@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize(
    ("mode", "targets"), [("bias", "k"), ("contextual", "k"), ("contextual", "qkv")]
)
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("grid", "prefix", "batch"), [((12, 16), 0, 2), ((24, 16), 2, 1)])
@pytest.mark.parametrize("mask", [None, "boolean", "additive"])
def test_grids_whose_rows_repeat(impl, mode, targets, shared, grid, prefix, batch, mask):
    spec = RPESpec("product", mode, targets, index=Clip(1), shared_heads=shared)
    case = Case(spec, grid, prefix, batch, mask=mask)
    assert case.maps[0].row_ids is not None
    expected = case.output_and_gradients("reference")
    assert_all_close(case.output_and_gradients(impl), expected, 1e-10)
    with torch.no_grad():
        torch.testing.assert_close(case.attention(impl), expected[0], rtol=1e-10, atol=1e-10)


@pytest.mark.usefixtures("large_blocks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("grid", "prefix"), [((12, 16), 0), ((24, 16), 1)])
def test_error_where_rows_repeat(impl, grid, prefix, dtype):
    check_error([RPESpec("product", targets="qkv", index=Clip(1))], impl, grid, prefix, dtype)


def test_maps_in_any_order_and_tables_of_any_heads(impl):
    """What is known of the maps of `cross` is used only where it holds."""
    case = Case(RPESpec("cross", targets="k"), (4, 5))
    row, column = case.maps
    first, second = case.tables["key_tables"]
    unshared = torch.randn(2, *second.shape[1:], dtype=second.dtype)
    for maps, tables in [
        ((column, row), (second, first)),
        ((row, row), (first, first)),
        ((row, column), (first, unshared)),
    ]:
        expected, actual = (
            rpe_attention(case.q, case.k, case.v, maps, key_tables=tables, impl=name)
            for name in ("reference", impl)
        )
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_a_batch_of_nothing(impl):
    case = Case(RPESpec("product", targets="qkv"), (3, 4), batch=0)
    out = case.attention(impl)
    out.sum().backward()
    assert out.shape == case.q.shape
    assert not case.tables["key_tables"][0].grad.any()


@pytest.mark.parametrize("grid", oracles.GRIDS)
@pytest.mark.parametrize("prefix", oracles.PREFIXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_is_at_most_twice_that_of_the_reference(impl, grid, prefix, dtype):
    """The exact result is the reference in float64, its inputs rounded to `dtype`."""
    specs = [RPESpec(method, targets="qkv") for method in ("product", "cross")]
    check_error(specs, impl, grid, prefix, dtype)


@pytest.mark.parametrize("grid", oracles.GRIDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_of_the_folded_form_is_at_most_twice_that_of_the_reference(grid, dtype):
    for prefix in oracles.PREFIXES:
        check_error([RPESpec("cross", targets="qkv")], "folded", grid, prefix, dtype)


def check_error(specs, impl, grid, prefix, dtype):
    for spec in specs:
        case = Case(spec, grid, prefix, batch=1, dim=8, dtype=dtype)
        exact = _in_float64(case).output_and_gradients("reference")
        plain = case.output_and_gradients("reference")
        fast = case.output_and_gradients(impl)
        # Two roundings of the result itself, and those of float32 sums over numbers of any size.
        sums = 16 * torch.finfo(torch.float32).eps * max(e.abs().max() for e in exact)
        for e, p, f in zip(exact, plain, fast, strict=True):
            allowed = 2 * (p - e).abs().max() + 2 * torch.finfo(dtype).eps * e.abs().max() + sums
            assert f.dtype == dtype
            assert (f - e).abs().max() <= allowed


def _in_float64(case):
    wide = Case(case.spec, case.grid, case.num_prefix_tokens, batch=1, dim=8)
    wide.q, wide.k, wide.v = (
        x.detach().double().requires_grad_() for x in (case.q, case.k, case.v)
    )
    wide.tables = {
        name: [t.detach().double().requires_grad_() for t in tables]
        for name, tables in case.tables.items()
    }
    wide.grad_out = case.grad_out.double()
    return wide


@pytest.mark.parametrize("spec", CROSS, ids=str)
@pytest.mark.parametrize(("grid", "prefix"), [((3, 5), 1), ((4, 2, 3), 0)])
@pytest.mark.parametrize("mask", [None, "boolean", "additive"])
def test_folded_equals_the_reference(spec, grid, prefix, mask):
    case = Case(spec, grid, prefix, mask=mask)
    expected = case.output_and_gradients("reference")
    assert_all_close(case.output_and_gradients("folded"), expected, 1e-10)


def test_folded_refuses_maps_of_several_axes():
    for method in ("product", "euclidean", "quantization"):
        with pytest.raises(ValueError, match="method 'cross'"):
            Case(RPESpec(method), (3, 5)).attention("folded")


def test_auto_can_be_asked_and_explicit_requests_are_kept(monkeypatch):
    assert automatic_impl() == "fused"
    for name in IMPLEMENTATIONS:
        called = []
        monkeypatch.setitem(IMPLEMENTATIONS, name, lambda *_, called=called: called.append(1))
        Case(RPESpec("cross"), (3, 5)).attention(name)
        assert called == [1]


@pytest.mark.parametrize("spec", CROSS, ids=str)
def test_gradcheck_of_the_folded_form(spec):
    test_gradcheck(spec, "folded")


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradcheck(spec, impl):
    case = Case(spec, (2, 3), batch=1, dim=3, mask="additive")
    names = list(case.tables)
    sizes = [len(tables) for tables in case.tables.values()]

    def attend(q, k, v, *rest):
        case.q, case.k, case.v, case.attn_mask = q, k, v, rest[-1]
        remaining = iter(rest)
        case.tables = {
            name: [next(remaining) for _ in range(size)]
            for name, size in zip(names, sizes, strict=True)
        }
        return case.attention(impl)

    assert torch.autograd.gradcheck(attend, tuple(case.leaves()), fast_mode=True)


def test_many_rows_take_the_direct_form(impl):
    for shared in (True, False):
        spec = RPESpec(targets="qkv", index=Clip(20), shared_heads=shared)
        case = Case(spec, (3, 5), 1)
        assert case.maps[0].num_used_buckets > case.q.shape[2]
        expected = case.output_and_gradients("reference")
        assert_all_close(case.output_and_gradients(impl), expected, 1e-10)


def test_dropout_has_the_gradient_of_what_it_dropped(impl):
    case = Case(RPESpec(targets="qkv"), (3, 5))

    def attend(q, k, v, query, key, value):
        case.q, case.k, case.v = q, k, v
        case.tables = {"query_tables": [query], "key_tables": [key], "value_tables": [value]}
        torch.manual_seed(0)
        return case.attention(impl, dropout_p=0.4)

    assert torch.autograd.gradcheck(attend, tuple(case.leaves()), fast_mode=True)


def test_backward_is_deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        case = Case(RPESpec(targets="qkv"), (7, 28), dtype=torch.float32)
        first = case.output_and_gradients("fused")
        for _ in range(3):
            again = case.output_and_gradients("fused")
            assert all(torch.equal(a, f) for a, f in zip(again, first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_weights_are_kept_only_while_they_are_small():
    small, large = torch.zeros(1, 1, 32, 8), torch.zeros(1, 1, 33, 8)
    for q, keeps in ((small, True), (large, False)):
        table = torch.zeros(1, 2, 8, requires_grad=True)
        tables = fused.Tables(key=(table,))
        assert fused._keeps_weights(q, q, q, tables) is keeps
        with torch.no_grad():
            assert not fused._keeps_weights(q, q, q, tables)


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_operators_pass_torchs_own_check():
    case = Case(RPESpec("cross", targets="qkv"), (2, 3), batch=1, mask="additive")
    arguments = (
        case.q,
        case.k,
        case.v,
        *(case.tables[name] for name in ("query_tables", "key_tables", "value_tables")),
        [],
        [m.ids for m in case.maps],
        case.attn_mask[None].detach().requires_grad_(),
        None,
        0.0,
        0.5,
    )
    for grid in ([2, 3], []):
        for keeps_weights in (True, False):
            torch.library.opcheck(fused.fused_attention, (*arguments, grid, [], keeps_weights))
    out, weights = fused.fused_attention(*arguments, grid, [], True)
    plain = [[x.detach() for x in a] if isinstance(a, list) else a for a in arguments]
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in plain]
    torch.library.opcheck(
        fused.fused_attention_backward,
        (torch.randn_like(out), weights.detach(), *plain, [2, 3], [], True),
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_operators_pass_torchs_own_check_where_rows_repeat():
    case = Case(RPESpec("product", targets="k", index=Clip(1)), (12, 16), 0, batch=1)
    (bucket_map,), (table,) = case.maps, case.tables["key_tables"]
    roles = ([], [table], [], [])
    rows = [bucket_map.row_ids, bucket_map.row_numbers]
    rest = ([bucket_map.compact_ids], None, None, 0.0, 0.5, [12, 16], rows)
    torch.library.opcheck(fused.fused_attention, (case.q, case.k, case.v, *roles, *rest, False))
    plain = [x.detach() for x in (case.q, case.k, case.v)]
    roles = ([], [table.detach()], [], [])
    first = (case.grad_out, case.q.new_empty(0).detach(), *plain, *roles)
    torch.library.opcheck(fused.fused_attention_backward, (*first, *rest, False))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_gradcheck_of_the_reference(spec):
    test_gradcheck(spec, "reference")
