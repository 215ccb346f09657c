"""Calls that random campaigns found to fail or to be wrong: threads, modes, nothing to do."""

import pytest
import safetensors.torch
import torch
from cases import Case, assert_all_close
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import irpe
from irpe import BucketMap, Clip, RPESpec, bucket_maps, rpe_attention
from irpe.ops.checks import check_call
from irpe.ops.choose import IMPLEMENTATIONS
from irpe.ops.impl.fast.slices import ALL, BOUNDS, Bounds, Slice, drop

ENCODINGS = [
    "product-contextual-qkv", "cross-contextual-qkv", "product-bias-k", "transformer-xl",
    "rope-axial", "rope-mixed+cross-contextual-k", "log-cpb", "alibi-2d", "decomposed", "sasa",
]  # fmt: skip


@pytest.fixture
def threads():
    """Sets the number of threads, and sets it back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("targets", ["k", "qkv"])
def test_dropout_is_the_same_whatever_the_number_of_threads(targets, threads, monkeypatch):
    monkeypatch.setitem(BOUNDS, "cpu", Bounds(weights=400, mask=400, kept=0))
    case = Case(RPESpec(targets=targets, index=Clip(1)), (4, 5), dim=1)  # its weights are not kept

    def run(forward, backward):
        torch.manual_seed(3)
        threads(forward)
        out = case.attention("fast", dropout_p=0.5)
        threads(backward)
        return [out, *torch.autograd.grad(out, case.leaves(), case.grad_out)]

    expected = run(1, 1)
    for forward, backward in ((1, 4), (4, 1), (2, 2)):
        assert_all_close(run(forward, backward), expected, 1e-12)
    torch.manual_seed(4)
    assert not torch.allclose(case.attention("fast", dropout_p=0.5), expected[0])


def test_dropped_weights_depend_on_the_place_of_a_pair_alone():
    q, v = torch.zeros(3, 4, 70, 2), torch.zeros(3, 4, 600, 2)
    maps = [BucketMap(torch.zeros(70, 600).long(), 1)]
    call = check_call(q, v, v, maps, bias_tables=[torch.zeros(1, 1)], dropout_p=0.3)
    scores = torch.ones(3, 4, 70, 600)
    everything = drop(scores, call, ALL)
    assert abs((everything == 0).float().mean().item() - 0.3) < 0.01
    assert len({tuple(row.tolist()) for row in everything[..., :40].reshape(-1, 40)}) == 3 * 4 * 70
    whole = slice(None)
    for place in (
        Slice(slice(1, 3), whole, whole),
        Slice(slice(2, 3), slice(1, 3), whole),
        Slice(slice(0, 1), slice(3, 4), slice(13, 60)),
        Slice(slice(0, 2), whole, slice(60, 70)),  # queries of several heads
    ):
        assert torch.equal(drop(scores[place], call, place), everything[place])


@pytest.mark.parametrize("name", ENCODINGS)
def test_autocast_leaves_float64_alone(name):
    encoding = irpe.RelativePositionEncoding(name, 2, 8, 1).double()
    attention = irpe.RPEAttention(16, 2, name, 1).double()
    q, k, v = torch.randn(3, 2, 2, 16, 8, dtype=torch.float64)
    x = torch.randn(2, 16, 16, dtype=torch.float64)
    expected = encoding(q, k, v, grid=(3, 5)), attention(x, (3, 5))
    with torch.autocast("cpu", torch.bfloat16):
        found = encoding(q, k, v, grid=(3, 5)), attention(x, (3, 5))
    assert all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("impl", ["plain", "fast"])
@pytest.mark.parametrize("mode", ["bias", "contextual"])
@pytest.mark.parametrize("is_first_shared", [True, False])
@pytest.mark.parametrize("is_first_for_all", [True, False])
def test_tables_and_maps_of_mixed_sharing(mode, is_first_shared, is_first_for_all, impl):
    case = Case(RPESpec("cross", mode, index=Clip(1)), (3, 5), heads=3)
    first, second = case.maps
    of_images = BucketMap(torch.stack([second.ids, first.ids]), second.num_buckets)
    maps = [first, of_images] if is_first_for_all else [of_images, first]
    heads = (1, 3) if is_first_shared else (3, 1)
    (name,) = case.tables
    shapes = [(n, *case.tables[name][0].shape[1:]) for n in heads]
    tables = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]

    def run(impl):
        out = rpe_attention(case.q, case.k, case.v, maps, **{name: tables}, impl=impl)
        leaves = [case.q, case.k, case.v, *tables]
        with torch.no_grad():
            again = rpe_attention(case.q, case.k, case.v, maps, **{name: tables}, impl=impl)
        return [out, again, *torch.autograd.grad(out, leaves, case.grad_out)]

    assert_all_close(run(impl), run("reference"), 1e-10)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("text", ["product-contextual-qkv", "cross-bias-k"])
def test_several_gradients_at_once_are_right_or_refused_with_the_remedy(text, impl):
    """The Jacobian is made of them: a backward pass under vmap after a plain forward pass."""
    encoding = irpe.RelativePositionEncoding(text, 2, 4, impl=impl)
    q = torch.randn(1, 2, 6, 4, requires_grad=True)

    def attend(q):
        return encoding(q, q, q, grid=(2, 3))

    try:
        out = attend(q)
    except irpe.UserError as error:
        assert "cannot compute this call" in str(error)  # noqa: PT017  an implementation of others
        return
    grads = torch.randn(3, *out.shape)
    one_by_one = [torch.autograd.grad(out, q, grad, retain_graph=True)[0] for grad in grads]
    expected = torch.stack(one_by_one), torch.autograd.functional.jacobian(attend, q)
    for compute, wanted in zip(
        (
            lambda: torch.autograd.grad(out, q, grads, is_grads_batched=True, retain_graph=True)[0],
            lambda: torch.autograd.functional.jacobian(attend, q, vectorize=True),
        ),
        expected,
        strict=True,
    ):
        if impl in ("reference", "plain"):
            torch.testing.assert_close(compute(), wanted)
        else:
            with pytest.raises(NotImplementedError, match="impl='plain'"):
                compute()


@pytest.mark.parametrize("name", ENCODINGS)
def test_shapes_are_computed_without_values(name):
    """A grid that no other test has: what fake tensors ask for is not what real ones get."""
    grid, options = (3, 13), {"dropout_p": 0.1}
    with FakeTensorMode():
        fake = irpe.RelativePositionEncoding(name, 2, 8, 1)
        q = torch.empty(2, 2, 40, 8, requires_grad=True)
        for arguments in ({}, options):
            out = fake(q, q, q, grid=grid, **arguments)
            assert isinstance(out, FakeTensor)
            assert out.shape == q.shape
            (gradient,) = torch.autograd.grad(out.sum(), q)
            assert gradient.shape == q.shape
    real = irpe.RelativePositionEncoding(name, 2, 8, 1)
    q = torch.randn(2, 2, 40, 8)
    assert type(real(q, q, q, grid=grid)) is torch.Tensor
    with FakeTensorMode():
        assert all(isinstance(m.compact_ids, FakeTensor) for m in fake.maps(grid))


@pytest.mark.parametrize("impl", ["reference", "plain", "fast"])
@pytest.mark.parametrize("targets", ["bias", "qkv"])
@pytest.mark.parametrize("shape", [(0, 2, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (2, 2, 0, 0)])
def test_nothing_to_attend_to_or_from(shape, targets, impl):
    batch, heads, queries, keys = shape
    maps = [BucketMap(torch.zeros(queries, keys).long(), 4)]
    q, k, v = (torch.randn(batch, heads, n, 8).requires_grad_() for n in (queries, keys, keys))
    kinds = ["bias_tables"] if targets == "bias" else ["query_tables", "key_tables", "value_tables"]
    width = () if targets == "bias" else (8,)
    tables = {kind: [torch.randn(1, 4, *width).requires_grad_()] for kind in kinds}
    out = rpe_attention(q, k, v, maps, **tables, impl=impl)
    assert torch.equal(out, torch.zeros_like(q))
    leaves = [q, k, v, *(ts[0] for ts in tables.values())]
    gradients = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    assert all(g is None or not g.any() for g in gradients)


def test_compiles_with_sizes_that_are_not_known():
    maps = bucket_maps("product-contextual-k", (3, 5))
    tables = [torch.randn(1, maps[0].num_buckets, 8)]

    def attend(q):
        return rpe_attention(q, q, q, maps, key_tables=tables)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch in (2, 5):
        q = torch.randn(batch, 2, 15, 8)
        torch.testing.assert_close(compiled(q), attend(q))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "text",
    [
        "product-contextual-qkv",
        "cross-bias-k",
        "alibi-2d",
        "rope-axial+ref14+product-bias-k",
        "rope-axial+shift1",
        "rope-mixed+shift1",
    ],
)
def test_modules_compile_with_sizes_that_are_not_known(text):
    """The maps, angles and coordinates are constants of the program here."""
    attention = irpe.RPEAttention(24, 2, text, 2)
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, grid in ((2, (2, 3)), (5, (4, 3))):
        x = torch.randn(batch, 2 + grid[0] * grid[1], 24)
        where = irpe.AugmentedGrid.of(grid) if "shift" in text else grid
        torch.testing.assert_close(compiled(x, grid=where), attention(x, grid=where))
    torch._dynamo.reset()


@pytest.mark.parametrize("count", [10**30, 2**40, -1, True, 1.0])
def test_a_number_of_prefix_tokens_that_no_image_has_is_refused(count):
    with pytest.raises(irpe.UserError, match="num_prefix_tokens"):
        irpe.RelativePositionEncoding("product-contextual-k", 2, 8, num_prefix_tokens=count)


@pytest.mark.parametrize("name", ["rope-axial", "rope-mixed", "rope-axial+product-bias-k"])
@pytest.mark.parametrize("grid", [(1, 1), (3, 4), (4, 5)])
def test_a_rotation_on_another_grid_is_refused(name, grid):
    encoding = irpe.RelativePositionEncoding(name, 2, 8)
    q = torch.randn(1, 2, 15, 8)
    with pytest.raises(irpe.UserError, match="15"):
        encoding(q, q, q, grid=grid)


def test_tables_of_another_encoding_are_refused():
    shaw, other = (irpe.RPEAttention(16, 2, text) for text in ("shaw", "product-contextual-k"))
    assert {k: v.shape for k, v in shaw.state_dict().items()} == {
        k: v.shape for k, v in other.state_dict().items()
    }
    with pytest.raises(
        RuntimeError, match=r"product-contextual-k@clip3.*product-contextual-k@1\.9"
    ):
        other.load_state_dict(shaw.state_dict())
    irpe.RPEAttention(16, 2, "shaw").load_state_dict(shaw.state_dict())
    other.load_state_dict(dict(shaw.state_dict()))  # a file without the text: what it always did


def test_safetensors_keeps_the_tables_and_not_the_encoding(tmp_path):
    """As docs/how-to/save-and-load.md says: of tensors alone, shapes are all that is compared."""
    shaw, other = (irpe.RPEAttention(16, 2, text) for text in ("shaw", "product-contextual-k"))
    torch.nn.init.normal_(shaw.rpe.key_tables[0])
    safetensors.torch.save_file(shaw.state_dict(), tmp_path / "state")
    safetensors.torch.save_model(shaw, tmp_path / "model")
    for name in ("state", "model"):
        safetensors.torch.load_model(other, tmp_path / name)
        assert torch.equal(other.rpe.key_tables[0], shaw.rpe.key_tables[0])
