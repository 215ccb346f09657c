import copy
import pickle

import oracles
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from cases import CPU_IMPLEMENTATIONS
from torch.utils.checkpoint import checkpoint

import irpe
from irpe import RelativePositionEncoding, RPEAttention, RPESpec, bucket_maps

GRID = (3, 5)


def make_attention(spec="product-contextual-qkv", prefix=1, **arguments):
    """An attention with random tables."""
    torch.manual_seed(0)
    attention = RPEAttention(32, num_heads=4, spec=spec, num_prefix_tokens=prefix, **arguments)
    for table in attention.rpe.parameters():
        torch.nn.init.normal_(table)
    return attention


def tokens(grid=GRID, prefix=1, dtype=torch.float32):
    torch.manual_seed(1)
    return torch.randn(2, prefix + torch.Size(grid).numel(), 32, dtype=dtype, requires_grad=True)


def gradients(attention, x, forward=None):
    out = (attention if forward is None else forward)(x, grid=GRID)
    return [out, *torch.autograd.grad(out.square().sum(), [x, *attention.parameters()])]


def assert_all_close(actual, expected, **tolerance):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **tolerance)


@pytest.mark.parametrize("spec", ["product-contextual-qkv", "cross-bias-k+unshared"])
def test_new_tables_are_zero_and_change_nothing(spec):
    attention = RPEAttention(32, num_heads=4, spec=spec, num_prefix_tokens=1)
    assert all((table == 0).all() for table in attention.rpe.parameters())
    x = tokens()
    q, k, v = attention.qkv(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
    plain = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 16, 32)
    torch.testing.assert_close(attention(x, grid=GRID), attention.proj(plain), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", oracles.METHODS)
def test_names_and_shapes_of_tables(method):
    encoding = RelativePositionEncoding(f"{method}-contextual-qk+unshared", 6, 64, 1)
    rows = encoding.spec.num_buckets(2, 1)
    expected = {
        f"{name}_tables.{i}": (6, count, 64)
        for name in ("query", "key")
        for i, count in enumerate(rows)
    }
    assert {name: tuple(t.shape) for name, t in encoding.state_dict().items()} == expected
    bias = RelativePositionEncoding(f"{method}-bias-k", 6, 64, 0)
    expected = {f"bias_tables.{i}": (1, r) for i, r in enumerate(bias.spec.num_buckets(2, 0))}
    assert {name: tuple(t.shape) for name, t in bias.state_dict().items()} == expected


@pytest.mark.parametrize("grid", oracles.GRIDS)
@pytest.mark.parametrize("prefix", oracles.PREFIXES)
def test_one_module_takes_any_grid_of_its_axes(grid, prefix):
    attention = make_attention(prefix=prefix, ndim=len(grid))
    assert attention(tokens(grid, prefix), grid=grid).shape == tokens(grid, prefix).shape


def test_weights_and_scores_can_be_asked_for():
    encoding = make_attention().rpe
    q, k, v = torch.randn(3, 2, 4, 16, 8)
    weights = encoding.weights(q, k, grid=GRID)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 16))
    scores = (q @ k.mT + encoding.scores(q, k, grid=GRID)) * 8**-0.5
    torch.testing.assert_close(weights, scores.softmax(-1))
    encoding.value_tables = torch.nn.ParameterList()
    torch.testing.assert_close(encoding(q, k, v, grid=GRID), weights @ v)


def test_wrong_grids_are_refused_and_not_guessed():
    attention = make_attention()
    with pytest.raises(ValueError, match="197 tokens but q has 16"):
        attention(tokens(), grid=(14, 14))
    with pytest.raises(ValueError, match="2 axes"):
        attention(tokens(), grid=(15,))
    with pytest.raises(ValueError, match="2 axes"):
        attention(tokens((3, 5, 1)), grid=(3, 5, 1))
    with pytest.raises(TypeError, match="grid"):
        attention(tokens())


def test_wrong_sizes_are_refused():
    with pytest.raises(ValueError, match=r"dim = 30 .* num_heads = 4"):
        RPEAttention(30, num_heads=4, spec="product-contextual-k")
    with pytest.raises(ValueError, match="num_prefix_tokens = -1"):
        RPEAttention(32, num_heads=4, spec="product-contextual-k", num_prefix_tokens=-1)
    with pytest.raises(ValueError, match="'produkt'"):
        RPEAttention(32, num_heads=4, spec="produkt-contextual-k")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes(dtype):
    exact = gradients(make_attention().double(), tokens().double())
    x = tokens().to(dtype).detach().requires_grad_()
    actual = gradients(make_attention().to(dtype), x)
    tolerance = 1e-6 if dtype == torch.float64 else 0.1
    for a, e in zip(actual, exact, strict=True):
        assert a.dtype == dtype
        assert (a - e).abs().max() <= tolerance * e.abs().max()


@pytest.mark.parametrize("impl", CPU_IMPLEMENTATIONS)
def test_autocast_gives_what_sdpa_gives(impl):
    encoding = make_attention("cross-contextual-qkv@clip1").rpe
    q, k, v = torch.randn(3, 2, 4, 16, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
        out = encoding(q, k, v, grid=GRID, impl=impl)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert encoding.key_tables[0].grad.dtype == torch.float32
    torch.testing.assert_close(out.float(), encoding(q, k, v, grid=GRID), rtol=0.1, atol=0.1)


def test_a_backward_pass_inside_autocast():
    encoding = make_attention().rpe
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))

    def gradients(is_inside):
        q.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            loss = encoding(q, k, v, grid=GRID).float().square().sum()
        with torch.autocast("cpu", torch.bfloat16, enabled=is_inside):
            loss.backward()
        return q.grad

    assert torch.equal(gradients(True), gradients(False))


def test_gradient_checkpointing():
    attention, x = make_attention(attn_drop=0.3), tokens()

    def forward(x, grid):
        torch.manual_seed(3)
        return checkpoint(attention, x, grid, use_reentrant=False)

    def plain(x, grid):
        torch.manual_seed(3)
        return attention(x, grid)

    assert_all_close(gradients(attention, x, forward), gradients(attention, x, plain))


def test_dropout_is_for_training_only():
    attention, x = make_attention(attn_drop=0.5), tokens()
    assert not torch.equal(attention(x, GRID), attention(x, GRID))
    attention.eval()
    assert torch.equal(attention(x, GRID), attention(x, GRID))


def test_copies_and_pickles_are_equal_and_independent():
    attention, x = make_attention(), tokens()
    expected = attention(x, GRID)
    for twin in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        torch.testing.assert_close(twin(x, GRID), expected, rtol=0, atol=0)
        torch.nn.init.zeros_(twin.rpe.key_tables[0])
        torch.testing.assert_close(attention(x, GRID), expected, rtol=0, atol=0)


def test_state_dict_round_trip_holds_tables_and_no_maps():
    attention, x = make_attention(), tokens()
    attention(x, GRID)
    state = attention.state_dict()
    assert [name for name in state if "rpe" in name] == [
        "rpe.query_tables.0",
        "rpe.key_tables.0",
        "rpe.value_tables.0",
    ]
    twin = RPEAttention(32, num_heads=4, spec="product-contextual-qkv", num_prefix_tokens=1)
    twin.load_state_dict(state)
    assert torch.equal(twin(x, GRID), attention(x, GRID))


def test_meta_device_then_empty_then_reset():
    attention = RPEAttention(32, num_heads=4, spec="cross-contextual-qkv", device="meta")
    assert attention(torch.zeros(2, 15, 32, device="meta"), grid=GRID).shape == (2, 15, 32)
    attention = attention.to_empty(device="cpu")
    attention.rpe.reset_parameters()
    assert all((table == 0).all() for table in attention.rpe.parameters())


def test_inference_first_then_training():
    grid = (3, 23)  # which no other test has made maps for
    attention, x = make_attention(), tokens(grid)
    with torch.inference_mode():
        expected = attention(x, grid=grid)
    out = attention(x, grid=grid)
    grads = torch.autograd.grad(out.square().sum(), [x, *attention.parameters()])
    torch.testing.assert_close(out, expected)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize(
    ("spec", "impl"),
    [
        ("product-contextual-qkv", "auto"),
        ("product-contextual-qkv@clip1", "fast"),
        ("cross-bias-k", "auto"),
        ("cross-contextual-qk", "fast"),
        ("cross-contextual-v", "plain"),
        ("transformer-xl", "auto"),
    ],
)
def test_compile_without_a_graph_break(spec, impl):
    attention, x = make_attention(spec, impl=impl), tokens()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert_all_close(gradients(attention, x, compiled), gradients(attention, x))
    # Other grids are compiled anew: several once, one that no other test has made maps for always.
    is_first = (spec, impl) == ("product-contextual-qkv", "auto")
    for grid in [(5, 3), (2, 19), (7, 28)] if is_first else [(2, 19)]:
        with torch.no_grad():
            actual = compiled(tokens(grid), grid)
        torch.testing.assert_close(actual, attention(tokens(grid), grid))
    torch._dynamo.reset()


def test_export():
    grid = (3, 29)  # which no other test has made maps for

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = make_attention()

        def forward(self, x):
            return self.attention(x, grid=grid)

    model, x = Model(), tokens(grid)
    dynamic = {"x": {0: torch.export.Dim("batch", min=2)}}
    program = torch.export.export(model, (x,), dynamic_shapes=dynamic)
    larger = torch.cat([x, x * 2])
    torch.testing.assert_close(program.module()(larger), model(larger))
    assert "irpe" not in str(program.graph)
    (bucket_map,) = bucket_maps(RPESpec(), grid, 1)
    assert type(bucket_map.compact_ids) is torch.Tensor


@pytest.mark.parametrize("grid", [None, "35"])
def test_what_is_not_a_grid_says_so(grid):
    with pytest.raises(TypeError, match="is not a sequence of axis lengths"):
        make_attention()(tokens(), grid=grid)


def test_tables_that_no_machine_holds_are_refused_with_their_size():
    with pytest.raises(ValueError, match=r"product-contextual-k@1e\+06.* any machine"):
        RPEAttention(32, num_heads=4, spec="product-contextual-k@1e6")


def test_tables_meet_queries_and_keys_before_a_rotation():
    encoding = make_attention("product-contextual-qkv").rpe
    q, k, v = torch.randn(3, 2, 4, 16, 8, dtype=torch.float64)
    angle = torch.arange(16.0, dtype=torch.float64)[:, None]

    def rotate(x):
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    rotated = rotate(q), rotate(k)
    options = {"grid": GRID, "table_q": q, "table_k": k}
    e = (rotated[0] @ rotated[1].mT + encoding.scores(q, k, grid=GRID)) * 8**-0.5
    torch.testing.assert_close(encoding.weights(*rotated, **options), e.softmax(-1))
    z = encoding(*rotated, v, **options)
    difference = (rotated[0] @ rotated[1].mT - q @ k.mT) * 8**-0.5
    torch.testing.assert_close(z, encoding(q, k, v, grid=GRID, attn_mask=difference))
    assert (z - encoding(q, k, v, grid=GRID)).abs().max() > 0.1


@pytest.mark.parametrize("spec", ["transformer-xl", "rope-axial", "rope-axial+product-bias-k"])
def test_encodings_that_change_queries_refuse_a_rotation_of_the_host(spec):
    encoding = make_attention(spec).rpe
    q = torch.randn(2, 4, 16, 8)
    with pytest.raises(irpe.UserError, match="table_q"):
        encoding(q, q, q, grid=GRID, table_q=q, table_k=q)


SCORED = ["product-contextual-qkv", "cross-bias-k", "product-bias-k+unshared", "transformer-xl"]


@pytest.mark.parametrize("spec", SCORED)
def test_a_temperature_is_a_factor_of_all_scores(spec):
    encoding = make_attention(spec).rpe.double()
    q, k, v = torch.randn(3, 2, 4, 16, 8, dtype=torch.float64)
    temperature = torch.tensor([0.5, 1.0, 2.0, 3.0], dtype=torch.float64)[:, None, None]
    e = (q @ k.mT + encoding.scores(q, k, grid=GRID)) * temperature
    weights = encoding.weights(q, k, grid=GRID, temperature=temperature)
    torch.testing.assert_close(weights, e.softmax(-1))
    z = encoding(q, k, v, grid=GRID, temperature=temperature)
    for head, factor in enumerate(temperature.flatten().tolist()):
        alone = encoding(q, k, v, grid=GRID, scale=factor)
        torch.testing.assert_close(z[:, head], alone[:, head])
    with pytest.raises(ValueError, match=r"scale 0\.5: a temperature stands in its place"):
        encoding(q, k, v, grid=GRID, temperature=temperature, scale=0.5)
