"""An attention class of the user's own, made known by `irpe.register_host`."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from adapters.small_models import images, perturb, state_of
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as attention_of_torch
from torch.utils.checkpoint import checkpoint

import irpe
from irpe.adapters import hosts
from irpe.adapters.equipped import table_names

SPEC = "product-contextual-qkv"


class OwnAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x):
        z = F.scaled_dot_product_attention(*self.split(x))
        return self.proj(z.transpose(1, 2).flatten(2))


class OwnBlock(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(dim), OwnAttention(dim, num_heads)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class OwnViT(nn.Module):
    def __init__(self, dim=32, depth=2, num_heads=2):
        super().__init__()
        self.sizes = {"dim": dim, "depth": depth, "num_heads": num_heads}
        self.patches = nn.Conv2d(3, dim, 8, 8)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks = nn.ModuleList(OwnBlock(dim, num_heads) for _ in range(depth))
        self.use_checkpoints = False

    def forward(self, x):
        x = self.patches(x).flatten(2).mT
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.use_checkpoints else block(x)
        return x[:, 0]


def build(arguments):
    return OwnViT(**arguments)


FOLLOWED = {"model": OwnViT, "convolution": "patches", "num_prefix_tokens": 1}


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    hosts_of_users: dict[str, object] = {}
    monkeypatch.setattr("irpe.adapters.hosts.registered.REGISTERED", hosts_of_users)
    monkeypatch.setattr(hosts, "REGISTERED", hosts_of_users)


def register(**arguments):
    irpe.register_host(OwnAttention, **arguments)


def make_own():
    torch.manual_seed(0)
    return perturb(OwnViT()).eval()


def make_equipped(**arguments):
    model = irpe.equip(make_own(), SPEC, **arguments)
    for name in table_names(model):
        nn.init.normal_(model.get_parameter(name))
    return model


def test_zero_tables_change_nothing_and_layers_are_chosen():
    register(**FOLLOWED)
    model, x = make_own(), images(16, 40)
    expected, before = model(x), state_of(model)
    assert irpe.supported(model).attentions == ("blocks.0.attention", "blocks.1.attention")
    irpe.equip(model, SPEC, layers=[1])
    irpe.equip(model, SPEC, layers=[0])
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
    assert len(irpe.summary(model).attentions) == 2
    irpe.unequip(model)
    assert {n: s[0] for n, s in state_of(model).items()} == {n: s[0] for n, s in before.items()}


@pytest.mark.parametrize("use_checkpoints", [False, True])
def test_the_grid_is_measured_and_agrees_with_one_that_is_passed(use_checkpoints):
    register(**FOLLOWED)
    model = make_equipped()
    inputs = [images(16, 48), images(48, 16)]  # as many tokens
    expected = []
    for x in inputs:
        told = irpe.equip(make_own(), SPEC, grid=[size // 8 for size in x.shape[-2:]])
        told.load_state_dict(model.state_dict())
        expected.append(told(x))
    model.use_checkpoints = use_checkpoints
    outputs = [model(x) for x in inputs]
    torch.testing.assert_close(outputs, expected)
    assert (outputs[0] - outputs[1]).abs().max() > 0.01
    sum(out.square().sum() for out in outputs).backward()
    model_grad = model.blocks[0].attention.rpe.key_tables[0].grad
    model.use_checkpoints = False
    model.zero_grad()
    sum(model(x).square().sum() for x in inputs).backward()
    torch.testing.assert_close(model_grad, model.blocks[0].attention.rpe.key_tables[0].grad)


def test_attention_is_that_of_the_module_of_the_library():
    register()
    torch.manual_seed(0)
    own, x = perturb(OwnAttention(32, 2)), torch.randn(2, 1 + 15, 32)
    irpe.equip(own, SPEC, grid=(3, 5), num_prefix_tokens=1)
    ours = irpe.RPEAttention(32, 2, SPEC, num_prefix_tokens=1)
    for name in table_names(own):
        nn.init.normal_(own.get_parameter(name))
    ours.load_state_dict(own.state_dict())
    torch.testing.assert_close(own(x), ours(x, grid=(3, 5)))


@pytest.mark.parametrize("describes", [True, False])
def test_saving_and_loading(tmp_path, describes):
    more = {"describe": lambda model: model.sizes, "build": build} if describes else {}
    register(**FOLLOWED, **more)
    model, x = make_equipped(), images(16, 40)
    irpe.save_equipped(model, tmp_path / "own")
    if not describes:
        with pytest.raises(ValueError, match="model=plain"):
            irpe.load_equipped(tmp_path / "own")
    loaded = irpe.load_equipped(tmp_path / "own", model=None if describes else OwnViT())
    assert torch.equal(loaded(x), model(x))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))


def test_a_file_names_a_class_and_never_imports_it(tmp_path):
    register(**FOLLOWED, describe=lambda model: model.sizes, build=build)
    irpe.save_equipped(make_equipped(), tmp_path / "own")
    hosts.REGISTERED.clear()
    with pytest.raises(ValueError, match=r"OwnAttention' is not a library.*register_host"):
        irpe.load_equipped(tmp_path / "own")


class CallsMethod(OwnAttention):
    def forward(self, x):
        return self.proj(self.attend(*self.split(x)).transpose(1, 2).flatten(2))

    def attend(self, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)


def attend(q, k, v):
    return attention_of_torch(q, k, v)


class CallsFunction(OwnAttention):
    def forward(self, x):
        z = attend(*self.split(x))
        return self.proj(z.transpose(1, 2).flatten(2))


def softmax_attention(q, k, v):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


class CallsSoftmax(OwnAttention):
    def forward(self, x):
        z = softmax_attention(*self.split(x))
        return self.proj(z.transpose(1, 2).flatten(2))


class OverridesMore(CallsMethod):
    def split(self, x):
        return super().split(x)

    def extra_repr(self):
        return "more than a forward"


CALLS = {
    CallsMethod: {}, CallsFunction: {}, OverridesMore: {},
    CallsSoftmax: {"call": "softmax_attention"},
}  # fmt: skip


@pytest.mark.parametrize("kind", CALLS)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_attention_is_answered_wherever_the_forward_calls_it(kind, is_compiled):
    register()
    irpe.register_host(kind, **CALLS[kind])
    torch.manual_seed(0)
    expected, own, x = OwnAttention(32, 2), kind(32, 2), torch.randn(2, 15, 32)
    own.load_state_dict(expected.state_dict())
    for attention in (expected, own):
        irpe.equip(attention, SPEC, grid=(3, 5))
    for name in table_names(own):
        nn.init.normal_(own.get_parameter(name))
    expected.load_state_dict(own.state_dict())
    torch._dynamo.reset()
    forward = torch.compile(own, fullgraph=True, backend="eager") if is_compiled else own
    torch.testing.assert_close(forward(x), expected(x))
    irpe.unequip(own)
    assert type(own) is kind


class Twice(OwnAttention):
    def forward(self, x):
        q, k, v = self.split(x)
        z = F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, k, v), k, v)
        return self.proj(z.transpose(1, 2).flatten(2))


class Sometimes(CallsMethod):
    def forward(self, x):
        return self.attend(*self.split(x)) if len(x) > 1 else x


def test_an_attention_that_is_not_answered_once_is_an_error():
    register()
    for kind, x in ((Twice, torch.randn(2, 15, 32)), (Sometimes, torch.randn(1, 15, 32))):
        irpe.register_host(kind)
        own = irpe.equip(kind(32, 2), SPEC, grid=(3, 5))
        with pytest.raises(irpe.UserError, match=kind.__name__):
            own(x)


class WithoutSizes(nn.Linear):
    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x)


WRONG = {
    "not a class": (OwnAttention(8, 2), {}, "is not a class of modules"),
    "softmax of its own": (CallsSoftmax, {}, "CallsSoftmax.forward does not call scaled_dot"),
    "another name": (CallsSoftmax, {"call": "attend_to"}, "does not call attend_to"),
    "half a grid": (OwnAttention, {"model": OwnViT}, "pass both"),
    "half a file": (
        OwnAttention,
        {**FOLLOWED, "build": build},
        "describe and build belong together",
    ),
    "tokens": (OwnAttention, {"num_prefix_tokens": -1}, "-1"),
}


@pytest.mark.parametrize(("attention", "arguments", "message"), WRONG.values(), ids=WRONG)
def test_wrong_registrations(attention, arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        irpe.register_host(attention, **arguments)
    assert not hosts.REGISTERED


def test_what_a_registered_class_cannot_have():
    with pytest.raises(
        ValueError, match=r"OwnAttention, which is not supported.*own-attention\.md"
    ):
        irpe.equip(make_own(), SPEC)
    register()
    with pytest.raises(ValueError, match="OwnAttention does not know its grid: pass grid="):
        irpe.equip(make_own(), SPEC)
    with pytest.raises(ValueError, match="absolute 'none'"):
        irpe.equip(make_own(), SPEC, grid=(2, 5), absolute="none")
    irpe.register_host(WithoutSizes)
    with pytest.raises(ValueError, match=r"pass head_size= to irpe\.register_host"):
        irpe.equip(WithoutSizes(8, 8), SPEC, grid=(2, 5))
    irpe.register_host(WithoutSizes, head_size=lambda attention: (2, 4))
    assert irpe.equip(WithoutSizes(8, 8), SPEC, grid=(2, 5)).rpe.size.head_dim == 4
