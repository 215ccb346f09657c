"""What holds for every model of timm, transformers and torchvision that can be equipped."""

import copy
import functools
import pickle

import oracles
import pytest
import torch
from adapters.hosts.library_models import (
    HOSTS,
    IN_WINDOWS,
    SMALLER,
    WINDOW,
    Outputs,
    equipped,
    predict,
)
from adapters.hosts.timm.families import FIRST
from adapters.small_models import gradients, perturb, state_of, unseen_spec

import irpe
from irpe.adapters.equipped import equipped_attentions
from irpe.adapters.grids import recorded_grid

SPEC = "product-contextual-qkv"
every_host = pytest.mark.parametrize(("make", "x", "prefix"), HOSTS.values(), ids=HOSTS)


def some_hosts(*names):
    """The rest is slow."""
    return pytest.mark.parametrize(
        ("make", "x"),
        [
            pytest.param(
                functools.partial(make, **SMALLER.get(name, {})),
                x,
                id=name,
                marks=() if name in names else pytest.mark.slow,
            )
            for name, (make, x, _) in HOSTS.items()
        ],
    )


every_window = pytest.mark.parametrize(
    ("make", "x"), [host[:2] for host in IN_WINDOWS.values()], ids=IN_WINDOWS
)


def assert_same(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(actual[name], value, **tolerance, msg=name)


@every_host
def test_zero_tables_change_nothing_and_random_ones_do(make, x, prefix):
    model, other, x = make().double(), make().double(), x.double()
    expected = gradients(model, x, Outputs(model))
    assert irpe.equip(other, SPEC) is other
    actual = gradients(other, x, Outputs(other))
    tables = {name for name in actual if ".rpe." in name}
    assert tables
    assert all(actual[name].abs().max() > 0 for name in tables if "value_tables" in name)
    shared = {name: value for name, value in actual.items() if name not in tables}
    assert_same(shared, expected, rtol=1e-6, atol=1e-8)
    assert (predict(perturb(other), x) - expected["out"]).abs().max() > 0.01


ONE_GRID = {name: host for name, host in HOSTS.items() if name not in FIRST}


@pytest.mark.parametrize(("make", "x", "prefix"), ONE_GRID.values(), ids=ONE_GRID)
def test_summary_tells_prefix_tokens_and_grid(make, x, prefix):
    model = irpe.equip(make(), SPEC)
    predict(model, x)
    attentions = irpe.summary(model).attentions
    assert {attention.num_prefix_tokens for attention in attentions} == {prefix}
    patch = {"DetrForObjectDetection": 32}.get(type(model).__name__, 8)
    grid = (x.shape[2] // patch, x.shape[3] // patch)
    if make in {host[0] for host in IN_WINDOWS.values()}:
        grid = (WINDOW, WINDOW) if "Image" in type(model).__name__ else (2, WINDOW)
    assert {attention.grid for attention in attentions} == {grid}


@every_host
def test_bfloat16(make, x, prefix):
    model = equipped(make)
    expected = predict(model, x)
    other = irpe.equip(make().bfloat16(), SPEC)
    other.load_state_dict(model.state_dict())
    actual = predict(other, x.bfloat16())
    assert actual.dtype == torch.bfloat16
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}
    plain = predict(make().bfloat16(), x.bfloat16()).float() - predict(make(), x)
    error = (actual.float() - expected).abs().max()
    assert error < 4 * plain.abs().max() + 0.02 * expected.abs().max()


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@every_host
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_copies_and_pickles_are_equal_and_independent(make, x, prefix, duplicate):
    model = equipped(make)
    expected = predict(model, x).detach()
    other = duplicate(model)
    assert torch.equal(predict(other, x), expected)
    assert str(irpe.summary(other)) == str(irpe.summary(model))
    perturb(other)
    assert not torch.equal(predict(other, x), expected)
    assert torch.equal(predict(model, x), expected)


@some_hosts("ViT")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compile_without_a_graph_break(make, x):
    torch._dynamo.reset()
    model = equipped(make, unseen_spec())
    expected = gradients(model, x, Outputs(model))
    compiled = torch.compile(Outputs(model), fullgraph=True, backend="aot_eager")
    actual = gradients(model, x, compiled)
    scale = max(float(value.abs().max()) for value in expected.values() if value is not None)
    assert_same(actual, expected, rtol=1e-3, atol=1e-5 * scale)
    torch._dynamo.reset()


@some_hosts("Swin", "timm's VisionTransformer")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export(make, x):
    model = Outputs(equipped(make, unseen_spec())).eval()
    dynamic = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(model, (x,), dynamic_shapes=dynamic)
    larger = torch.cat([x, x * 2])
    torch.testing.assert_close(program.module()(larger), model(larger), rtol=1e-4, atol=1e-4)
    assert "irpe" not in str(program.graph)


@some_hosts()
@pytest.mark.filterwarnings("ignore")  # the exporter warns of its own deprecations
def test_onnx_runtime_agrees(make, x, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
    pytest.importorskip("onnxscript", reason="needs the extra 'export'")
    model, path = Outputs(equipped(make)).eval(), tmp_path / "model.onnx"
    dynamic = ({0: torch.export.Dim("batch")},)
    torch.onnx.export(model, (x,), path, dynamo=True, dynamic_shapes=dynamic, verbose=False)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (x[:1], torch.cat([x, x * 2, x])):
        (actual,) = session.run(None, {session.get_inputs()[0].name: batch.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(actual), model(batch), rtol=0, atol=1e-4)


@every_host
def test_wrong_arguments_leave_the_model_unchanged(make, x, prefix):
    for arguments in ({"layers": [99]}, {"spec": "no-such-thing"}, {"absolute": "learned"}):
        model = make()
        before, config = state_of(model), dict(vars(getattr(model, "config", model)))
        with pytest.raises(ValueError, match=r"99|is not one of"):
            irpe.equip(model, **{"spec": SPEC, **arguments})
        assert state_of(model) == before
        assert dict(vars(getattr(model, "config", model))) == config


@every_host
def test_layers_are_counted_from_the_input(make, x, prefix):
    model = irpe.equip(make(), SPEC, layers=[-1])
    names = [attention.name for attention in irpe.summary(model).attentions]
    every = irpe.summary(irpe.equip(make(), SPEC)).attentions
    assert names == [every[-1].name]
    torch.testing.assert_close(predict(model, x), predict(make(), x), rtol=1e-4, atol=1e-4)


def test_attentions_that_are_called_see_the_papers_equations():
    spec = f"{SPEC}@clip2+unshared"
    index = functools.partial(oracles.clip, beta=2)
    for name in ("ViT", "DeiT", "DINOv2", "DINOv2 with registers", "Swin", "DETR"):
        make, x, prefix = HOSTS[name]
        model = equipped(make, spec)
        calls = calls_of(model, x)
        assert len(calls) >= 2
        for attention, args, kwargs, (actual, _) in calls:
            grid = recorded_grid(attention)
            (ids,), _ = oracles.bucket_ids("product", grid, prefix, index, 2)
            expected = by_equations(attention, torch.tensor(ids), *args, **kwargs)
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-3, msg=name)


def calls_of(model, x):
    """How the equipped attentions are called: module, arguments, named arguments, result."""
    calls = []

    def note(*call):
        calls.append(call)

    for attention in equipped_attentions(model).values():
        attention.register_forward_hook(note, with_kwargs=True)
    predict(model, x)
    return calls


def by_equations(
    attention, ids, hidden_states, attention_mask=None, position_embeddings=0, **kwargs
):
    """Eq. 13-17 of an attention of transformers, with the mask of shifted windows."""
    x = hidden_states + position_embeddings
    parts = attention.q_proj(x), attention.k_proj(x), attention.v_proj(hidden_states)
    q, k, v = (part.unflatten(-1, (-1, attention.head_dim)).transpose(1, 2) for part in parts)
    roles = ("query_tables", "key_tables", "value_tables")
    r_q, r_k, r_v = (getattr(attention.rpe, role)[0][:, ids] for role in roles)
    b = torch.einsum("whid,hijd->whij", q, r_k) + torch.einsum("whjd,hijd->whij", k, r_q)
    e = (q @ k.mT + b) * q.shape[-1] ** -0.5
    if hasattr(attention, "relative_position_bias"):
        e = e + attention.relative_position_bias()
    if attention_mask is not None:
        e = e + attention_mask.repeat(len(x) // len(attention_mask), 1, 1).unsqueeze(1)
    a = e.softmax(-1)
    z = a @ v + torch.einsum("whij,hijd->whid", a, r_v)
    return attention.o_proj(z.transpose(1, 2).flatten(2))


def bias_tables_of(model):
    """Swin's own tables, one for each attention, in order."""
    return [p for name, p in model.named_parameters() if "relative_position_bias_table" in name]


@every_window
def test_a_bias_per_offset_is_what_swin_has_of_its_own(make, x):
    plain, model = make(), irpe.equip(make(), "product-bias-k@clip3+unshared")
    attentions = equipped_attentions(model).values()
    with torch.no_grad():
        for own, attention in zip(bias_tables_of(plain), attentions, strict=True):
            rows, columns = recorded_grid(attention)
            table = torch.randn(attention.rpe.bias_tables[0].shape)
            attention.rpe.bias_tables[0].copy_(table)
            used = table.unflatten(1, (7, 7))[:, 4 - rows : 3 + rows, 4 - columns : 3 + columns]
            head_dim = attention.qkv.in_features // len(table) if hasattr(attention, "qkv") else 8
            own.add_(used.flatten(1).T / head_dim**0.5)
    expected = predict(plain, x)
    torch.testing.assert_close(predict(model, x), expected, rtol=1e-4, atol=1e-4)
    assert (expected - predict(make(), x)).abs().max() > 0.01


@every_window
def test_a_dropped_bias_is_a_bias_of_zero(make, x):
    plain, dropped = make(), irpe.equip(make(), SPEC, builtin_bias="drop")
    with torch.no_grad():
        for table in bias_tables_of(plain):
            table.zero_()
    assert not bias_tables_of(dropped)
    torch.testing.assert_close(predict(dropped, x), predict(plain, x), rtol=1e-4, atol=1e-4)
    assert (predict(plain, x) - predict(make(), x)).abs().max() > 0.01
    some = irpe.equip(make(), SPEC, builtin_bias="drop", layers=[0])
    assert len(bias_tables_of(some)) == len(bias_tables_of(plain)) - 1


@every_window
@pytest.mark.parametrize(
    "arguments", [{"grid": (4, 4)}, {"num_prefix_tokens": 1}, {"absolute": "sinusoid"}], ids=str
)
def test_what_a_swin_cannot_have(make, x, arguments):
    model = make()
    before = state_of(model)
    with pytest.raises(ValueError, match=r"WindowAttention|SwinAttention|absolute encoding"):
        irpe.equip(model, SPEC, **arguments)
    assert state_of(model) == before


@every_host
def test_inference_first_then_training(make, x, prefix):
    model = equipped(make, unseen_spec())
    with torch.inference_mode():
        expected = predict(model, x)
    actual = gradients(model, x, Outputs(model))
    torch.testing.assert_close(actual["out"], expected.clone())
    tables = [value for name, value in actual.items() if ".rpe." in name]
    assert all(value.isfinite().all() and value.any() for value in tables)


@every_host
def test_dropout_of_attention_is_for_training_only(make, x, prefix):
    names = {"timm": "attn_drop_rate", "torchvision": "attention_dropout"}
    kind = type(make())
    name = names.get(kind.__module__.partition(".")[0], "attention_probs_dropout_prob")
    name = "attention_dropout" if "Detr" in kind.__name__ else name
    if kind.__name__ == "MaxxVit":
        pytest.skip("timm's MaxViT sets the dropout of attention within a configuration")
    model = equipped(functools.partial(make, **{name: 0.5}))
    torch.testing.assert_close(predict(model, x), predict(equipped(make), x))
    for attention in equipped_attentions(model).values():
        attention.train()
    first, second = predict(model, x), predict(model, x)
    assert not torch.allclose(first, second)
