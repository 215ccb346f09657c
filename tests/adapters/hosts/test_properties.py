"""Hosts x properties: what holds for every model that can be equipped."""

import copy
import functools
import math
import pickle
from dataclasses import replace

import pytest
import torch
from adapters.hosts.by_hand import calls_of, stock_forward
from adapters.hosts.table import (
    HOSTS,
    SPEC,
    TIMM,
    TORCHVISION,
    TRANSFORMERS,
    Outputs,
    assert_same,
    gradients,
    predict,
    randomize,
    tensors_of,
    use,
)
from adapters.small_models import state_of, unseen_spec
from torch import nn

import irpe
from irpe.adapters.answer import stock_class
from irpe.adapters.equip import _plan_change
from irpe.adapters.equipped import Equipment, equipped_attentions, table_names
from irpe.adapters.grids import source_of
from irpe.adapters.host import Given, Own
from irpe.adapters.hosts import full_name, row_of
from irpe.adapters.hosts.timm.rows import ROWS as ROWS_OF_TIMM
from irpe.adapters.hosts.torchvision import _ROWS as ROWS_OF_TORCHVISION
from irpe.adapters.hosts.transformers import _ROWS as ROWS_OF_TRANSFORMERS
from irpe.core.sinusoid import sinusoid

FEW = [
    "timm's VisionTransformer", "timm's DINOv3", "timm's rope-vit, grouped", "timm's BEiT",
    "timm's SAM", "timm's Swin v2", "timm's MaxViT", "timm's Twins", "timm's TinyViT",
    "torchvision's VisionTransformer", "torchvision's SwinTransformer", "ViT", "DINOv3", "YOLOS",
    "LW-DETR's ViT", "DETR", "RT-DETR", "SAM", "Swin", "Swin v2", "PVT v2",
]  # fmt: skip


def hosts(*names, among=HOSTS, of=lambda host: True):
    """A test of each of these hosts; the others are slow. Without names none is."""
    chosen = {name: host for name, host in among.items() if of(host)}
    marks = {name: () if not names or name in names else pytest.mark.slow for name in chosen}
    return pytest.mark.parametrize(
        "host", [pytest.param(host, id=n, marks=marks[n]) for n, host in chosen.items()]
    )


every_host, few_hosts = hosts(), hosts(*FEW)


def distance(one, other):
    """How far two outputs differ, relative to their size."""
    return float((one - other).detach().norm() / other.detach().norm())


def test_every_row_has_a_host():
    found = {full_name(type(m)) for host in HOSTS.values() for m in host.make().modules()}
    assert set(ROWS_OF_TIMM) <= found
    assert {full_name(kind) for kind in ROWS_OF_TORCHVISION} <= found
    names = {name.rpartition(".")[2] for name in found}
    rows = [ROWS_OF_TRANSFORMERS[name] for name in names if name in ROWS_OF_TRANSFORMERS]
    missing = {n for n, row in ROWS_OF_TRANSFORMERS.items() if not any(row is r for r in rows)}
    assert not missing - {"Data2VecVisionSelfAttention"}  # which is refused


@every_host
def test_zero_tables_change_nothing_and_random_ones_do(host):
    model, inputs = host.make().double(), host.inputs(dtype=torch.float64)
    expected = gradients(model, inputs)
    assert irpe.equip(model, SPEC) is model
    actual = gradients(model, inputs)
    tables = {name: actual.pop(name) for name in list(actual) if ".rpe." in name}
    assert set(tables) == set(table_names(model))
    assert all(grad.any() for name, grad in tables.items() if "value_tables" in name)
    assert_same(actual, expected, rtol=host.rtol, atol=0.01 * host.rtol)
    assert distance(predict(randomize(model), inputs), expected["out"]) > 1e-3


@every_host
def test_an_attention_is_answered_once_with_what_its_stock_forward_does_by_hand(host):
    model = host.equipped(f"{SPEC}+unshared")
    calls = calls_of(model, functools.partial(predict, model, host.inputs()))
    assert len(calls) >= len(equipped_attentions(model))
    for attention, args, kwargs, actual, grid in calls:
        if isinstance(attention, nn.MultiheadAttention):
            continue  # in test_torch_nn.py
        expected = stock_forward(attention, args, kwargs, grid)
        scale = float(expected.abs().max())
        torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4 * scale)
        attention.rpe.reset_parameters()
        plain = stock_forward(attention, args, kwargs, grid)
        assert (actual - plain).abs().max() > 1e-2 * plain.abs().max()


@hosts(*FEW, "timm's ViT of any size", "timm's DINOv3, of any size", "ViT of any size", "CLIP",
       of=lambda host: host.grid is not None)  # fmt: skip
def test_the_grid_follows_the_input(host):
    model = host.equipped()
    for size, grid in host.sizes.items():
        inputs = host.inputs(size)
        expected = predict(model, inputs)
        last = irpe.summary(model).attentions[-1]
        assert (last.num_prefix_tokens, last.grid) == (host.prefix, grid)
        if host.takes_grid:
            told = irpe.equip(host.make(), SPEC, grid=grid)
            told.load_state_dict(model.state_dict())
            assert torch.equal(predict(told, inputs), expected)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@few_hosts
@pytest.mark.parametrize("twin", [copy.deepcopy, pickled])
def test_copies_and_pickles_are_equal_and_independent_and_become_plain(host, twin):
    model, inputs = host.make(), host.inputs()
    kinds = [type(module) for module in model.modules()]
    plain, before = predict(model, inputs).detach(), model.state_dict()
    randomize(irpe.equip(model, SPEC))
    if twin is pickled and "Backbone" in type(model).__name__:
        return  # transformers hooks its backbones with what cannot be pickled
    other = twin(model)
    expected = predict(model, inputs).detach()
    assert torch.equal(predict(other, inputs), expected)
    assert str(irpe.summary(other)) == str(irpe.summary(model))
    with torch.no_grad():
        for name in table_names(other):
            other.get_parameter(name).zero_()
    assert not torch.equal(predict(other, inputs), expected)
    assert torch.equal(predict(model, inputs), expected)
    assert irpe.unequip(other).keys() == set(table_names(model))
    assert [type(module) for module in other.modules()] == kinds
    assert list(other.state_dict()) == list(before)
    assert torch.equal(predict(other, inputs), plain)
    assert torch.equal(predict(model, inputs), expected)


@few_hosts
def test_files(host, tmp_path):
    model, inputs = host.equipped(), host.inputs()
    expected = predict(model, inputs)
    irpe.save_equipped(model, tmp_path / "ours")
    loaded = [irpe.load_equipped(tmp_path / "ours", host.make())]
    if host.is_described:
        loaded.append(irpe.load_equipped(tmp_path / "ours"))
    for each in loaded:
        assert torch.equal(predict(each, inputs), expected)
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(tmp_path / "theirs")
        theirs = irpe.load_equipped(tmp_path / "theirs")
        torch.testing.assert_close(predict(theirs, inputs), expected)
    assert irpe.unequip(loaded[0]).keys() == set(table_names(model))
    torch.testing.assert_close(predict(loaded[0], inputs), predict(host.make(), inputs))


@hosts("timm's DINOv3", "timm's BEiT", "DINOv3", "CLIP", "Conditional DETR", "ViTDet", "Swin v2",
       "LW-DETR's ViT")  # fmt: skip
def test_gradient_checkpointing(host):
    model, inputs = host.equipped().train(), host.inputs()
    for module in model.modules():
        module.train(not isinstance(module, nn.BatchNorm2d))
    expected = gradients(model, inputs)
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next((getattr(model, name) for name in names if hasattr(model, name)), None)
    if enable is None and not hasattr(model, "set_grad_checkpointing"):
        pytest.skip("the library does not checkpoint this model")
    if not getattr(model, "supports_gradient_checkpointing", True):
        pytest.skip("the library does not checkpoint this model")
    if enable is None:
        try:
            model.set_grad_checkpointing(True)
        except AssertionError:
            pytest.skip("the library does not checkpoint this model")
    else:
        enable({"use_reentrant": False})
    predict(model, host.inputs(list(host.sizes)[-1]))  # another grid in between
    assert_same(gradients(model, inputs), expected, rtol=1e-4, atol=1e-5)


@few_hosts
def test_planning_is_pure_and_errors_leave_the_model_unchanged(host):
    model = host.make()
    before, config = state_of(model), dict(vars(getattr(model, "config", model)))
    call = Equipment(irpe.parse_encoding(SPEC), None, None, None, "keep", "keep")
    change = _plan_change(model, call)
    assert state_of(model) == before
    for arguments in (
        {"layers": [99]}, {"spec": "no-such-thing"}, {"absolute": "learned"},
        {"builtin_bias": "none"}, {"builtin_bias": "convert"},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"99|is not one of|convert"):
            irpe.equip(model, **{"spec": SPEC, **arguments})
        assert state_of(model) == before
        assert dict(vars(getattr(model, "config", model))) == config
    for swap in change:
        swap.exchange()
    assert table_names(model)
    for swap in reversed(change):
        swap.exchange()
    assert state_of(model) == before
    irpe.equip(model, SPEC)
    before = state_of(model)
    with pytest.raises(ValueError, match="already equipped"):
        irpe.equip(model, SPEC)
    assert state_of(model) == before


@few_hosts
def test_what_knows_its_grid_installs_nothing_on_the_model(host):
    """Only measured grids need hooks, classes or attributes outside of the attentions."""
    model, plain = irpe.equip(host.make(), SPEC), host.make()
    attentions = equipped_attentions(model)
    rows = {name: row_of(stock_class(attention)) for name, attention in attentions.items()}
    is_measured = any(source_of(attention) is not None for attention in attentions.values())
    for name in attentions if is_measured else ():
        assert not isinstance(rows[name].grid, Own | Given)
    modules = dict(plain.named_modules())
    for name, module in model.named_modules():
        if is_measured or name in attentions or ".rpe" in name:
            continue
        assert type(module) is type(modules[name])
        assert not module._forward_pre_hooks
        assert len(module._forward_hooks) == len(modules[name]._forward_hooks)
        assert source_of(module) is None


@hosts(of=lambda host: host.bias)
def test_a_dropped_bias_is_a_bias_of_zero(host):
    model, plain = irpe.equip(host.make(), SPEC, builtin_bias="drop"), host.make()
    inputs = host.inputs()
    before = predict(plain, inputs)
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            if host.bias[0] in name:
                parameter.zero_()
    expected = predict(plain, inputs)
    torch.testing.assert_close(predict(model, inputs), expected, rtol=1e-3, atol=1e-4)
    assert distance(expected, before) > 1e-4
    assert not [name for name, _ in model.named_parameters() if host.bias[-1] in name]
    irpe.unequip(model)
    torch.testing.assert_close(predict(model, inputs), before, rtol=0, atol=0)


@hosts(*FEW, of=lambda host: not host.bias)
def test_there_is_no_bias_to_drop(host):
    with pytest.raises(irpe.UserError, match="no relative encoding of its own"):
        irpe.equip(host.make(), SPEC, builtin_bias="drop")


@hosts(of=lambda host: host.absolute)
@pytest.mark.parametrize("absolute", ["none", "sinusoid"])
def test_absolute_encodings_are_replaced(host, absolute):
    model, plain = irpe.equip(host.make(), SPEC, absolute=absolute), host.make()
    name = next(n for n, _ in plain.named_parameters() if n.endswith(host.absolute))
    inputs = host.inputs(list(host.sizes)[-1])
    learned, before = plain.get_parameter(name), predict(plain, inputs)
    grid = host.own_grid or host.grid
    with torch.no_grad():
        learned.zero_()
        if absolute == "sinusoid":
            dim = learned.shape[-1]
            learned.view(-1, dim)[-math.prod(grid) :] = sinusoid(grid, dim)
    torch.testing.assert_close(predict(model, inputs), predict(plain, inputs), rtol=1e-4, atol=1e-4)
    assert distance(predict(model, inputs), before) > 1e-3
    assert name not in model.state_dict()
    assert name not in dict(model.named_parameters())


@few_hosts
def test_layers_are_counted_from_the_input(host):
    model, inputs = irpe.equip(host.make(), SPEC, layers=[-1]), host.inputs()
    every = list(equipped_attentions(irpe.equip(host.make(), SPEC)))
    assert list(equipped_attentions(model)) == [every[-1]]
    torch.testing.assert_close(
        predict(model, inputs), predict(host.make(), inputs), rtol=1e-4, atol=1e-4
    )


@few_hosts
def test_bfloat16(host):
    model, inputs, low = host.equipped(), host.inputs(), host.inputs(dtype=torch.bfloat16)
    expected = predict(model, inputs)
    other = irpe.equip(host.make().bfloat16(), SPEC)
    other.load_state_dict(model.state_dict())
    assert {p.dtype for p in other.parameters()} == {torch.bfloat16}
    plain = distance(predict(host.make().bfloat16(), low).float(), predict(host.make(), inputs))
    assert distance(predict(other, low).float(), expected) < 4 * plain + 0.02


@few_hosts
def test_inference_first_then_training(host):
    model, inputs = host.equipped(unseen_spec()), host.inputs()
    with torch.inference_mode():
        expected = predict(model, inputs)
    actual = gradients(model, inputs)
    torch.testing.assert_close(actual["out"], expected.clone())
    tables = [value for name, value in actual.items() if ".rpe." in name]
    assert all(value.isfinite().all() and value.any() for value in tables)


DROPOUT = {"timm": "attn_drop_rate", "torchvision": "attention_dropout"}


@hosts("timm's VisionTransformer", "timm's Swin v2", "timm's GCViT", "timm's Twins",
       "torchvision's VisionTransformer", "torchvision's SwinTransformer", "ViT", "DETR", "Swin",
       "Swin v2", "MaskFormer's Swin", "PVT v2")  # fmt: skip
def test_dropout_of_attention_is_for_training_only(host):
    kind = type(host.make())
    name = DROPOUT.get(kind.__module__.partition(".")[0], "attention_probs_dropout_prob")
    if hasattr(host.make(), "config") and not hasattr(host.make().config, name):
        name = "attention_dropout"
    try:
        model = replace(host, make=functools.partial(host.make, **{name: 0.5})).equipped()
    except TypeError:
        pytest.skip("the library sets the dropout of attention elsewhere")
    inputs = host.inputs()
    torch.testing.assert_close(predict(model, inputs), predict(host.equipped(), inputs))
    for attention in equipped_attentions(model).values():
        attention.train()
    first, second = predict(model, inputs), predict(model, inputs)
    assert not torch.allclose(first, second)


@hosts("DINOv3", "YOLOS", "RT-DETR", "SAM, eager", "Swin v2", "Swin", "DETR", "PVT v2",
       "LW-DETR's ViT", among=TRANSFORMERS)  # fmt: skip
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_weights_are_returned_when_they_are_asked_for(host, implementation):
    model, plain = irpe.equip(host.make(), SPEC), host.make()
    name = "encoder_attentions" if hasattr(plain.config, "encoder_layers") else "attentions"
    use(plain, "eager")
    try:
        use(model, implementation)
    except ValueError:
        pytest.skip(f"the library does not offer {implementation} here")
    ask = {**host.inputs(), "output_attentions": True}
    expected, actual = (tensors_of(each(**ask)[name]) for each in (plain, model))
    if implementation == "sdpa" and not actual:
        pytest.skip("the library passes on that weights are asked for with 'eager' alone")
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    weights, *_ = tensors_of(randomize(model)(**ask)[name])
    assert distance(weights, actual[0]) > 0.01


@hosts("timm's VisionTransformer")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of dynamo, where a host breaks graphs
def test_compile(host):
    torch._dynamo.reset()
    model, inputs = smaller(host).equipped(unseen_spec()), host.inputs()
    expected = gradients(model, inputs)
    whole = type(model).__module__.startswith(("timm.", "torchvision."))
    compiled = torch.compile(Outputs(model), fullgraph=whole, backend="aot_eager")
    actual = gradients(model, inputs, compiled)
    scale = max(float(value.abs().max()) for value in expected.values())
    assert_same(actual, expected, rtol=1e-3, atol=1e-5 * scale)
    torch._dynamo.reset()


def smaller(host):
    """The host with less of it, for what takes long."""
    return replace(host, make=functools.partial(host.make, **host.smaller))


EXPORTED = {f"timm's {name}": host for name, host in TIMM.items()} | {
    f"torchvision's {name}": host for name, host in TORCHVISION.items()
} | {name: TRANSFORMERS[name] for name in ("ViT", "DINOv3", "Swin", "DETR", "SAM")}  # fmt: skip


@hosts("Swin", "timm's VisionTransformer", among=EXPORTED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_export(host):
    model, inputs = Outputs(smaller(host).equipped(unseen_spec())).eval(), host.inputs()
    program = torch.export.export(model, (inputs,))
    torch.testing.assert_close(program.module()(inputs), model(inputs), rtol=1e-4, atol=1e-4)
    assert "irpe" not in str(program.graph)


@pytest.mark.slow
@hosts(among=EXPORTED)
@pytest.mark.filterwarnings("ignore")  # the exporter warns of its own deprecations
def test_onnx_runtime_agrees(host, tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs the extra 'export'")
    pytest.importorskip("onnxscript", reason="needs the extra 'export'")
    model, path = Outputs(host.equipped()).eval(), tmp_path / "model.onnx"
    inputs = host.inputs()
    torch.onnx.export(model, (inputs,), path, dynamo=True, verbose=False)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    x = inputs[host.name] if host.name else inputs
    (actual,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(actual), model(inputs), rtol=0, atol=1e-4)
