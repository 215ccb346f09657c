"""Every way to compute attention equals the reference: whole tensors and all gradients."""

import pytest
import torch
from cases import CPU_IMPLEMENTATIONS, Case, assert_all_close
from pairs import all_pairs, text

from irpe import BucketMap, Clip, Piecewise, RPESpec, rpe_attention
from irpe.ops.checks import check_call
from irpe.ops.differentiable import _flatten

WAYS = [*(name for name in CPU_IMPLEMENTATIONS if name != "reference"), "fast, small slices"]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
TARGETS = ["bias", "q", "k", "v", "qk", "qv", "kv", "qkv"]
# Rows of 12 x 16 and of 24 x 16 repeat with Clip(1); 3 x 5 and 2 x 3 x 4 use more rows than keys
# with Clip(9), and few with the others.
GRIDS = [((3, 5), 1), ((2, 3, 4), 0), ((1, 9), 5), ((12, 16), 0), ((24, 16), 2), ((1, 1), 0)]
PAIRS = all_pairs(
    way=WAYS,
    method=["product", "cross", "euclidean", "quantization"],
    targets=TARGETS,
    grid=GRIDS,
    index=[Clip(1), Clip(9), Piecewise.from_ratio(1.9)],
    shared=[True, False],
    mask=[None, "boolean", "padding", "additive"],
    batch=[1, 2, 0],
    layout=["rotated", "strided", ""],
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factors", PAIRS, ids=text)
def test_outputs_and_gradients_equal_the_reference(factors, device, use_way):
    f = factors
    is_bias = f["targets"] == "bias"
    spec = RPESpec(
        f["method"],
        "bias" if is_bias else "contextual",
        "k" if is_bias else f["targets"],
        f["index"],
        f["shared"],
    )
    grid, prefix = f["grid"]
    case = Case(
        spec,
        grid,
        prefix,
        f["batch"],
        mask=f["mask"],
        is_rotated=f["layout"] == "rotated",
        is_strided=f["layout"] == "strided",
        device=device,
    )
    expected = case.output_and_gradients("reference")
    impl = use_way(f["way"])
    assert_all_close(case.output_and_gradients(impl), expected, 1e-10)
    with torch.no_grad():
        assert_all_close([case.attention(impl)], expected[:1], 1e-10)


def test_the_cases_above_are_all_pairs():
    factors = {"way": WAYS, "targets": TARGETS, "grid": GRIDS, "batch": [0, 1, 2]}
    for a, b in [("way", "targets"), ("way", "grid"), ("targets", "grid"), ("grid", "batch")]:
        found = {(str(case[a]), str(case[b])) for case in PAIRS}
        assert found == {(str(x), str(y)) for x in factors[a] for y in factors[b]}


@pytest.mark.parametrize("way", WAYS)
def test_cross_of_several_heads_and_images(way, use_way):
    """Each implementation takes this one, so none hides behind a refusal."""
    case = Case(RPESpec("cross", targets="qkv", index=Clip(1)), (5, 6), 1, batch=3, mask="additive")
    expected = case.output_and_gradients("reference")
    assert_all_close(case.output_and_gradients(use_way(way)), expected, 1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_prefix_tokens_of_cross_among_many_pairs(way, use_way):
    """From 4,096 pairs of a head on, what depends on one axis is looked up by coordinates."""
    case = Case(RPESpec("cross", targets="qk", index=Clip(1)), (9, 8), 2, batch=1)
    expected = case.output_and_gradients("reference")
    assert_all_close(case.output_and_gradients(use_way(way)), expected, 1e-10)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_a_mask_is_added_once_to_the_bias_of_several_images(way, shared, use_way):
    case = Case(RPESpec("cross", "bias", shared_heads=shared), (5, 6), batch=3, mask="additive")
    expected = case.attention("reference")
    with torch.no_grad():
        assert_all_close([case.attention(use_way(way))], [expected], 1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_maps_in_any_order_and_tables_of_any_heads(way, use_way):
    """What repeats over the grid is found in the ids, not in the order of the maps."""
    case = Case(RPESpec("cross", targets="k", index=Clip(1)), (4, 5))
    row, column = case.maps
    first, second = case.tables["key_tables"]
    unshared = torch.randn(2, *second.shape[1:], dtype=second.dtype)
    impl = use_way(way)
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


def _rectangle(batch=None):
    """5 queries that look at 12 keys, the same for all images or not."""
    generator = torch.Generator().manual_seed(0)
    shape = (5, 12) if batch is None else (batch, 5, 12)
    bucket_map = BucketMap(torch.randint(7, shape, generator=generator), 7)
    q, k, v = (
        torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for n in (5, 12, 12)
    )
    names = ("query_tables", "key_tables", "value_tables")
    tables = {
        name: torch.randn(3, 7, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for name in names
    }
    bias = torch.randn(1, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    return bucket_map, (q, k, v), {**tables, "bias_tables": bias}


@pytest.mark.parametrize("batch", [None, 2])
@pytest.mark.parametrize("way", WAYS)
def test_rectangles_and_maps_of_each_image(way, batch, use_way):
    bucket_map, qkv, tables = _rectangle(batch)

    def run(impl):
        lists = {name: [table] for name, table in tables.items()}
        out = rpe_attention(*qkv, [bucket_map], **lists, impl=impl)
        return [out, *torch.autograd.grad(out.square().sum(), [*qkv, *tables.values()])]

    assert_all_close(run(use_way(way)), run("reference"), 1e-10)


@pytest.mark.parametrize("way", [*WAYS, "reference"])
def test_dropout_has_the_gradient_of_what_it_dropped(way, use_way):
    case = Case(RPESpec("cross", targets="qkv", index=Clip(1)), (3, 5), batch=1)
    impl = use_way(way)

    def attend(q, k, v, *tables):
        case.q, case.k, case.v = q, k, v
        names = ("query_tables", "key_tables", "value_tables")
        case.tables = {name: tables[2 * i : 2 * i + 2] for i, name in enumerate(names)}
        torch.manual_seed(0)
        return case.attention(impl, dropout_p=0.4)

    assert torch.autograd.gradcheck(attend, tuple(case.leaves()), fast_mode=True)


@pytest.mark.parametrize("way", [*WAYS, "reference"])
def test_backward_is_deterministic(way, use_way):
    case = Case(RPESpec("cross", targets="qkv", index=Clip(1)), (7, 28), dtype=torch.float32)
    impl = use_way(way)
    torch.use_deterministic_algorithms(True)
    try:
        first, again = (case.output_and_gradients(impl) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, f) for a, f in zip(again, first, strict=True))


def test_the_weights_are_kept_only_while_they_are_small(use_way):
    impl = use_way("fast, small slices")
    for grid, is_kept in (((4, 4), True), ((4, 5), False)):  # 16 keys of dimension 1, and more
        case, shapes = Case(RPESpec("product", index=Clip(1)), grid, 0, dim=1), []

        def pack(x, shapes=shapes):
            shapes.append(tuple(x.shape))
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            case.attention(impl)
        tokens = grid[0] * grid[1]
        assert ((2, 2, tokens, tokens) in shapes) is is_kept


@pytest.mark.parametrize("targets", ["k", "qkv"])
@pytest.mark.parametrize("keeps", [True, False])
def test_operators_pass_torchs_own_check(targets, keeps):
    case = Case(RPESpec("cross", targets=targets, index=Clip(1)), (3, 4), batch=1, mask="additive")
    call = check_call(case.q, case.k, case.v, case.maps, **case.tables, attn_mask=case.attn_mask)
    detached = [None if x is None else x.detach() for x in call.leaves()]
    arguments = _flatten(call.with_leaves(detached))
    checks = ("test_schema", "test_faketensor")
    operator = torch.ops.irpe.fast.default
    torch.library.opcheck(operator, (*arguments, keeps), test_utils=checks)
    out, *kept = operator(*arguments, keeps)
    of_backward = (torch.randn_like(out), kept, True, *arguments)
    torch.library.opcheck(torch.ops.irpe.fast_backward.default, of_backward, test_utils=checks)


@pytest.mark.parametrize("targets", ["bias", *TARGETS[2:]])
def test_gradcheck_of_the_reference(targets):
    """All other gradients are compared with those of the reference."""
    spec = RPESpec(mode="bias") if targets == "bias" else RPESpec("cross", targets=targets)
    case = Case(spec, (2, 3), 1, batch=1, mask="additive", is_rotated=True)
    names, sizes = list(case.tables), [len(tables) for tables in case.tables.values()]

    def attend(q, k, v, *rest):
        case.q, case.k, case.v, case.attn_mask = q, k, v, rest[-1]
        remaining = iter(rest)
        case.tables = {
            name: [next(remaining) for _ in range(size)]
            for name, size in zip(names, sizes, strict=True)
        }
        case.unrotated = {name: next(remaining) for name in case.unrotated}
        return case.attention("reference")

    assert torch.autograd.gradcheck(attend, tuple(case.leaves()), fast_mode=True)
