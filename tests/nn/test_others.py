"""The encodings that the paper compares with, against loops over their equations."""

import copy
import pickle

import oracles_others as others
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from nn.random_encodings import DIM, HEADS, make, nested
from pairs import all_pairs, text
from torch import nn

from irpe import RelativePositionEncoding, RPEAttention
from irpe.core.sinusoid import offset_sinusoids

ORACLES = {
    "shaw": others.shaw,
    "huang": others.huang,
    "sasa@9": lambda learned: others.sasa(learned, 9),
    "transformer-xl": others.transformer_xl,
    "axial-deeplab@2": lambda learned: others.axial_deeplab(learned, 2),
}
BY_AXIS = ("sasa@9", "axial-deeplab@2")
GRIDS = [(3, 5), (1, 9), (1, 1), (7,), (2, 3, 4)]


def loops(name, encoding, qkv, grid, prefix, scale):
    equation = ORACLES[name](nested(encoding))
    positions = others.positions_of(grid, prefix)
    results = [[], [], []]
    for of_head in qkv[0].new_tensor(torch.stack(qkv).tolist()).flatten(1, 2).unbind(1):
        q, k, v = of_head.tolist()
        for kept, result in zip(
            results, others.attention(q, k, v, positions, scale, **equation), strict=True
        ):
            kept.append(result)
    lead = qkv[0].shape[:2]
    return [torch.tensor(kept, dtype=torch.float64).unflatten(0, lead) for kept in results]


@pytest.mark.parametrize(
    "factors", all_pairs(prefix=[0, 1, 5], grid=GRIDS, name=list(ORACLES)), ids=text
)
def test_the_loops_over_the_equation_agree(factors):
    name, grid, prefix = factors["name"], factors["grid"], factors["prefix"]
    encoding, (q, k, v) = make(name, grid, prefix)
    out, weights, scores = loops(name, encoding, [q, k, v], grid, prefix, scale=0.3)
    actual = encoding(q, k, v, grid=grid, scale=0.3, impl="reference")
    torch.testing.assert_close(actual, out)
    torch.testing.assert_close(encoding.weights(q, k, grid=grid, scale=0.3), weights)
    torch.testing.assert_close(encoding.scores(q, k, grid=grid), scores)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("name", ORACLES)
def test_every_implementation_has_the_gradients_of_the_reference(name, prefix):
    grid = (3, 5)
    encoding, qkv = make(name, grid, prefix)
    leaves = [*qkv, *encoding.parameters()]
    mask = torch.rand(qkv[0].shape[2], qkv[0].shape[2]) > 0.2
    weight = torch.randn_like(qkv[0])

    def gradients(impl):
        out = encoding(*qkv, grid=grid, attn_mask=mask, impl=impl)
        return torch.autograd.grad((out * weight).sum(), leaves)

    expected = gradients("reference")
    assert all((gradient != 0).any() for gradient in expected)
    for impl in ["plain", "fast", "auto"]:
        for actual, gradient in zip(gradients(impl), expected, strict=True):
            torch.testing.assert_close(actual, gradient)


@pytest.mark.parametrize("name", [*ORACLES, "sasa", "axial-deeplab"])
def test_new_parameters_are_zero_and_change_nothing(name):
    attention = RPEAttention(32, num_heads=4, spec=name, num_prefix_tokens=1)
    assert sum(p.numel() for p in attention.rpe.parameters())
    assert all((parameter == 0).all() for parameter in attention.rpe.parameters())
    x = torch.randn(2, 16, 32)
    q, k, v = attention.qkv(x).view(2, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
    plain = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 16, 32)
    actual = attention(x, grid=(3, 5))
    torch.testing.assert_close(actual, attention.proj(plain), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ORACLES)
def test_every_parameter_learns_after_one_step(name):
    encoding, qkv = make(name, (3, 5), 1)
    encoding.reset_parameters()
    for _ in range(2):
        encoding.zero_grad()
        encoding(*qkv, grid=(3, 5)).square().sum().backward()
        with torch.no_grad():
            for parameter in encoding.parameters():
                parameter -= 0.01 * parameter.grad
    assert all((parameter != 0).any() for parameter in encoding.parameters())


@pytest.mark.parametrize("name", ORACLES)
def test_copies_text_and_state_round_trips(name):
    encoding, qkv = make(name, (3, 5), 1)
    expected = encoding(*qkv, grid=(3, 5))
    twin = RelativePositionEncoding(str(encoding.spec), HEADS, DIM, 1, dtype=torch.float64)
    assert twin.spec == encoding.spec
    twin.load_state_dict(encoding.state_dict())
    for other in (twin, copy.deepcopy(encoding), pickle.loads(pickle.dumps(encoding))):
        assert torch.equal(other(*qkv, grid=(3, 5)), expected)


@pytest.mark.parametrize("name", ORACLES)
def test_compile_without_a_graph_break_and_export(name):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoding, _ = make(name, (3, 5), 1, torch.float32)

        def forward(self, q, k, v):
            return self.encoding(q, k, v, grid=(3, 5))

    model, (_, qkv) = Model(), make(name, (3, 5), 1, torch.float32)
    expected = model(*qkv)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*qkv), expected)
    torch._dynamo.reset()
    program = torch.export.export(model, tuple(x.detach() for x in qkv))
    torch.testing.assert_close(program.module()(*qkv), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ORACLES)
def test_other_dtypes(name, dtype):
    exact, qkv = make(name, (3, 5), 1)
    expected = exact(*qkv, grid=(3, 5))
    actual = copy.deepcopy(exact).to(dtype)(*(x.to(dtype) for x in qkv), grid=(3, 5))
    assert actual.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.15
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


def test_inference_first_then_training():
    offset_sinusoids.cache_clear()
    encoding, qkv = make("transformer-xl", (3, 5), 1)
    with torch.inference_mode():
        encoding(*qkv, grid=(3, 5))
    encoding(*qkv, grid=(3, 5)).sum().backward()
    assert encoding.projection.grad.isfinite().all()


def test_sasa_takes_every_grid_up_to_its_size_and_no_larger():
    encoding, qkv = make("sasa@5", (5, 3), 1)
    larger = RelativePositionEncoding("sasa@6", HEADS, DIM, 1, dtype=torch.float64)
    for table, other in zip(encoding.parameters(), larger.parameters(), strict=True):
        other.data[:, 1:-2], other.data[:, -1] = table.data[:, :-1], table.data[:, -1]
    for grid in [(5, 3), (3, 5)]:
        torch.testing.assert_close(encoding(*qkv, grid=grid), larger(*qkv, grid=grid))
    with pytest.raises(ValueError, match=r"grid 2x6 is larger than the tables of sasa@5.*sasa@6"):
        encoding(*(torch.randn(3, 1, HEADS, 13, DIM).double()), grid=(2, 6))


def test_heads_that_cannot_be_shared_by_the_axes():
    with pytest.raises(ValueError, match="multiple of 3"):
        RelativePositionEncoding("sasa", 2, 8, ndim=3)
    with pytest.raises(ValueError, match="multiple of 4"):
        RelativePositionEncoding("transformer-xl", 2, 6)


def test_a_single_attention_cannot_have_cpvt():
    with pytest.raises(ValueError, match=r"between the blocks.*irpe\.equip"):
        RPEAttention(32, num_heads=4, spec="cpvt")


def test_the_tied_table_of_huang_is_one_parameter_with_both_gradients():
    encoding, qkv = make("huang", (3, 5), 1)
    assert [name for name, _ in encoding.named_parameters()] == ["key_tables.0"]
    untied = RelativePositionEncoding("product-contextual-qk@clip3", HEADS, DIM, 1).double()
    for table in untied.parameters():
        table.data = encoding.key_tables[0].data.clone()
    for module in (encoding, untied):
        module(*qkv, grid=(3, 5)).square().sum().backward()
    both = untied.query_tables[0].grad + untied.key_tables[0].grad
    torch.testing.assert_close(encoding.key_tables[0].grad, both)
