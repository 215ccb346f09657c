"""Forward-mode derivatives, torch.func, and derivatives of derivatives: right, or refused."""

import pytest
import torch
from cases import Case
from torch.autograd import forward_ad

from irpe import Clip, RPESpec, rpe_attention

# PyTorch's own forward-mode rules are TorchScript, which it warns of.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


@pytest.fixture
def case():
    return Case(RPESpec(targets="qkv", index=Clip(1)), (3, 5), batch=1)


def attend(case, q, impl="auto"):
    case.q = q
    return case.attention(impl)


def finite_difference(case, q, direction, step=1e-6):
    above, below = (attend(case, q + sign * step * direction, "plain") for sign in (1, -1))
    return (above - below) / (2 * step)


def test_forward_mode_derivatives(case):
    q, direction = case.q.detach(), torch.randn_like(case.q)
    expected = finite_difference(case, q, direction)
    _, found = torch.func.jvp(lambda x: attend(case, x), (q,), (direction,))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    with forward_ad.dual_level():
        out = attend(case, forward_ad.make_dual(q, direction))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, expected)
    assert found.abs().max() > 0.1


def test_forward_mode_is_refused_where_it_would_be_wrong(case):
    q = case.q.detach().requires_grad_()
    with forward_ad.dual_level(), pytest.raises(ValueError, match="forward-mode"):
        attend(case, forward_ad.make_dual(q, torch.ones_like(q)), "fast")


def test_function_transforms_give_what_autograd_gives(case):
    q = case.q.detach()
    weight = case.grad_out

    def loss(x):
        return (attend(case, x) * weight).sum()

    leaf = q.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(q), expected)
    torch.testing.assert_close(torch.func.jacrev(loss)(q), expected)
    torch.testing.assert_close(torch.func.jacfwd(loss)(q[..., :1, :1, :1] * 0 + q), expected)
    several = torch.stack([q, 2 * q])
    each = torch.stack([attend(case, x).detach() for x in several])
    torch.testing.assert_close(torch.func.vmap(lambda x: attend(case, x))(several), each)


def test_derivatives_of_derivatives_work_or_name_what_does(case):
    leaf = case.q.detach().requires_grad_()
    (first,) = torch.autograd.grad(attend(case, leaf, "plain").sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), leaf)
    assert second.abs().max() > 0
    out = attend(case, leaf, "fast").sum()
    with pytest.raises(NotImplementedError, match="impl='plain'"):
        torch.autograd.grad(out, leaf, create_graph=True)


def test_several_gradients_at_once_work_or_name_what_does(case):
    leaf, weights = case.q.detach().requires_grad_(), torch.randn(3, *case.q.shape).double()
    out = attend(case, leaf, "plain")
    (found,) = torch.autograd.grad(out, leaf, weights, is_grads_batched=True)
    out = attend(case, leaf, "fast")
    for weight, of_weight in zip(weights, found, strict=True):
        (expected,) = torch.autograd.grad(out, leaf, weight, retain_graph=True)
        torch.testing.assert_close(of_weight, expected)
    with pytest.raises(NotImplementedError, match="impl='plain'"):
        torch.autograd.grad(out, leaf, weights, is_grads_batched=True)
    with pytest.raises(NotImplementedError, match="impl='plain'"):
        torch.autograd.functional.jacobian(lambda x: attend(case, x, "fast"), leaf, vectorize=True)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.func.vmap(f)(torch.stack([x, 2 * x])),
        lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    ],
    ids=["grad", "vmap", "jvp"],
)
def test_compiled_transforms(case, transform):
    q, k, v, maps, tables = case.q.detach(), case.k, case.v, case.maps, case.tables

    def run(x):
        return transform(lambda y: rpe_attention(y, k, v, maps, **tables).square().sum(), x)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(q), run(q))
    torch._dynamo.reset()


@pytest.mark.parametrize("impl", ["plain", "fast"])
def test_compiled_with_one_tensor_in_several_places(case, impl):
    table = case.tables["key_tables"][0]

    def run(x, table):
        tables = {"query_tables": [table], "key_tables": [table]}
        return rpe_attention(x, x, x, case.maps, **tables, impl=impl).square().sum()

    q = case.q.detach().requires_grad_()
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    found, expected = (torch.autograd.grad(f(q, table), [q, table]) for f in (compiled, run))
    for f, e in zip(found, expected, strict=True):
        torch.testing.assert_close(f, e)
    torch._dynamo.reset()
