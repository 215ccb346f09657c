"""The grid of a forward pass belongs to that pass: always two shapes, mostly of as many tokens."""

import copy
import functools
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from adapters.hosts.table import equipped, make_detr, make_dinov2, predict
from adapters.small_models import images, make_vit, perturb
from timm.layers import Attention, set_reentrant_ckpt
from timm.layers.patch_embed import PatchEmbed
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)

import irpe

SPEC = "product-contextual-qkv"
make_timm = functools.partial(make_vit, dynamic_img_size=True)
make_detr = functools.partial(make_detr, dropout=0.0)
# How a model is made, two inputs of as many tokens, the patch size, and where the images enter.
MODELS = {
    "timm": (make_timm, (32, 48), (48, 32), 8, "patch_embed"),
    "transformers": (make_dinov2, (32, 48), (48, 32), 8, "dinov2.embeddings"),
    "DETR": (make_detr, (64, 96), (96, 64), 32, "model.input_projection"),
}
every_model = pytest.mark.parametrize("name", MODELS)


def model_and_inputs(name, **arguments):
    """A model with random tables, two images, and what it makes of each, by a grid that is told."""
    make, *sizes, patch, _ = MODELS[name]
    make = functools.partial(make, **arguments)
    model = equipped(make, SPEC, absolute="none")
    inputs = [images(*size) for size in sizes]
    expected = []
    for x in inputs:
        grid = (x.shape[-2] // patch, x.shape[-1] // patch)
        told = irpe.equip(make(), SPEC, grid=grid, absolute="none")
        told.load_state_dict(model.state_dict())
        expected.append(predict(told, x).detach())
    return model, inputs, expected


def in_two_threads(function, arguments):
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(function, arguments))


def assert_equal(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


def meet(barrier, *_):
    """A hook: both threads have seen their image before either goes on."""
    barrier.wait(timeout=20)


@every_model
def test_two_threads(name):
    model, inputs, expected = model_and_inputs(name)
    barrier = threading.Barrier(2)
    model.get_submodule(MODELS[name][-1]).register_forward_hook(functools.partial(meet, barrier))
    with torch.no_grad():
        actual = in_two_threads(functools.partial(predict, model), inputs)
    assert_equal(actual, expected)
    assert (expected[0] - expected[1]).abs().max() > 0.01


def test_two_threads_without_order():
    model = equipped(make_timm, SPEC)
    inputs = [images(32, 48), images(48, 32), images(16, 40), images(64, 24)] * 5
    with torch.inference_mode():
        expected = [model(x) for x in inputs]
        actual = in_two_threads(torch.inference_mode()(model), inputs)
    assert_equal(actual, expected)


def gradients_of(model, inputs, run_backward):
    model.zero_grad()
    run_backward(sum(predict(model, x).square().sum() for x in inputs))
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def in_another_thread(loss):
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def use_checkpoints(model, is_reentrant):
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
        set_reentrant_ckpt(is_reentrant)
    else:
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable = next(getattr(model, name) for name in names if hasattr(model, name))
        enable({"use_reentrant": is_reentrant})


@every_model
@pytest.mark.parametrize("is_reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing_of_two_shapes_in_one_step(name, is_reentrant):
    model, inputs, _ = model_and_inputs(name)
    model.train()
    expected = gradients_of(model, inputs, torch.Tensor.backward)
    assert any(".rpe." in table for table in expected)
    use_checkpoints(model, is_reentrant)
    try:
        for run_backward in (torch.Tensor.backward, in_another_thread):
            actual = gradients_of(model, inputs, run_backward)
            assert actual.keys() == expected.keys()
            for key, value in expected.items():
                scale = float(value.abs().max())
                torch.testing.assert_close(actual[key], value, rtol=1e-3, atol=1e-4 * scale)
    finally:
        set_reentrant_ckpt(False)


def test_compiled_in_two_threads():
    model, inputs, expected = model_and_inputs("timm", depth=1)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    for _ in range(2):  # compiled first, then found again
        assert_equal(map(compiled, inputs), expected)
        assert_equal(in_two_threads(compiled, inputs), expected)
    assert_equal(map(model, inputs), expected)
    torch._dynamo.reset()


def test_blocks_compiled_one_by_one():
    model, inputs, expected = model_and_inputs("timm", depth=1)
    for block in model.blocks:
        block.compile(fullgraph=True, backend="eager", dynamic=False)
    with torch.no_grad():
        assert_equal(map(model, inputs), expected)
        assert_equal(in_two_threads(torch.no_grad()(model), inputs), expected)
    torch._dynamo.reset()


def stages(model, x):
    """The tokens after each block."""
    tokens = model._pos_embed(model.patch_embed(x))
    for block in model.blocks:
        tokens = block(tokens)
        yield tokens


def test_interleaved_generators():
    model, inputs, _ = model_and_inputs("timm")
    expected = [list(stages(model, x)) for x in inputs]
    actual = zip(*zip(*(stages(model, x) for x in inputs), strict=True), strict=True)
    for one, other in zip(actual, expected, strict=True):
        assert_equal(one, other)


def test_two_inputs_before_the_first_block_are_refused():
    model, inputs, expected = model_and_inputs("timm")
    tokens = [model._pos_embed(model.patch_embed(x)) for x in inputs]
    with pytest.raises(RuntimeError, match=r"grids \(4, 6\) and \(6, 4\)"):
        model.blocks(tokens[0])
    model.patch_embed(inputs[0])  # of no consequence for a call of the model itself
    assert_equal(map(model, inputs), expected)


def test_tokens_that_change_threads_between_blocks():
    model, inputs, _ = model_and_inputs("timm")
    _, second = model.blocks
    expected = [list(stages(model, x))[-1] for x in inputs]
    tokens = [next(stages(model, x)) for x in inputs]
    assert_equal(in_two_threads(second, tokens), expected)


@pytest.mark.parametrize("where", ["blocks.0.norm1", "blocks.0", "blocks.1.attn"])
def test_a_model_that_is_called_inside_itself(where):
    model, inputs, expected = model_and_inputs("timm")
    inner, is_inside = [], []

    def call_again(module, arguments):
        if not is_inside:
            is_inside.append(True)
            inner.append(model(inputs[1]))
            is_inside.pop()

    model.get_submodule(where).register_forward_pre_hook(call_again)
    assert_equal([model(inputs[0]), *inner], expected)


def test_a_model_inside_a_block_of_another():
    model, inputs, expected = model_and_inputs("timm")
    other = copy.deepcopy(model)
    inner = []
    model.blocks[0].norm1.register_forward_hook(lambda *_: inner.append(other(inputs[1])))
    assert_equal([model(inputs[0]), *inner], expected)


def test_a_pass_that_fails_leaves_nothing_behind():
    model, inputs, expected = model_and_inputs("timm")

    def fail(*_):
        raise RuntimeError("out of memory")

    handle = model.blocks[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(inputs[0])
    handle.remove()
    attention = model.blocks[0].attn
    model.patch_embed(inputs[1])
    told = irpe.equip(make_timm(), SPEC, grid=(6, 4), absolute="none")
    told.load_state_dict(model.state_dict())
    x = torch.randn(1, 25, 32)
    assert torch.equal(attention(x), told.blocks[0].attn(x))
    assert_equal(map(model, inputs), expected)


def new_embedding(model):
    """Another patch embedding with the same weights."""
    embedding = PatchEmbed(32, 8, 3, 32, flatten=False, output_fmt="NHWC", strict_img_size=False)
    embedding.load_state_dict(model.patch_embed.state_dict())
    return embedding


def test_a_replaced_embedding():
    model, inputs, expected = model_and_inputs("timm")
    model(images(16, 96))
    model.patch_embed = new_embedding(model)
    with pytest.raises(RuntimeError, match=r"25 tokens, .* replaced after"):
        model.forward_features(inputs[0])
    assert_equal(map(model, inputs), expected)
    assert_equal([model.forward_head(model.forward_features(x)) for x in inputs], expected)


def test_a_replaced_embedding_of_a_compiled_model():
    model, inputs, expected = model_and_inputs("timm", depth=1)
    model(images(16, 96))
    model.patch_embed = new_embedding(model)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    with pytest.raises(Exception, match="the grid of this input is not known"):
        compiled(inputs[0])
    model(inputs[1])
    torch._dynamo.reset()
    assert_equal(map(compiled, inputs), expected)
    torch._dynamo.reset()


def test_a_replaced_projection_of_transformers():
    model, inputs, expected = model_and_inputs("transformers")
    patches = model.dinov2.embeddings.patch_embeddings
    patches.projection = copy.deepcopy(patches.projection)
    patches.projection._forward_hooks.clear()
    assert_equal([predict(model, x) for x in inputs], expected)


def test_an_embedding_that_two_models_share():
    model, inputs, expected = model_and_inputs("timm")
    other = copy.deepcopy(model)
    other.patch_embed = model.patch_embed
    for x, e in zip(inputs, expected, strict=True):
        assert_equal([model(x), other(x), model(x)], [e] * 3)
    assert_equal([model(inputs[0]), other(inputs[1])], expected)


def replicate(module):
    """A replica as nn.DataParallel makes it: new modules over the same attributes and tensors."""
    replica = module._replicate_for_data_parallel()
    for name, child in module._modules.items():
        replica._modules[name] = None if child is None else replicate(child)
    for name, parameter in module._parameters.items():
        replica.__dict__[name] = parameter
    return replica


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@every_model
@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickled])
def test_copies_in_threads(name, duplicate):
    model, inputs, expected = model_and_inputs(name)
    predict(model, inputs[1])
    twin = duplicate(model)
    with torch.no_grad():
        calls = [(model, inputs[0]), (twin, inputs[1])]
        assert_equal(in_two_threads(lambda call: predict(*call), calls), expected)
    assert type(twin) is type(model)
    assert irpe.summary(model).attentions[0].grid != irpe.summary(twin).attentions[0].grid
    twin.zero_grad()
    predict(twin, inputs[0]).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_replicas_in_threads():
    model, inputs, expected = model_and_inputs("timm")
    barrier = threading.Barrier(2)
    model.patch_embed.register_forward_hook(functools.partial(meet, barrier))
    calls = zip([replicate(model), replicate(model)], inputs, strict=True)
    with torch.no_grad():
        assert_equal(in_two_threads(lambda call: call[0](call[1]), calls), expected)


def test_export_takes_the_grid_of_its_example():
    model, inputs, expected = model_and_inputs("timm", depth=1)
    programs = [torch.export.export(model, (x,)).module() for x in inputs]
    assert_equal([program(x) for program, x in zip(programs, inputs, strict=True)], expected)
    assert_equal(map(model, inputs), expected)


def test_meta_tensors_and_inference_mode():
    model, inputs, expected = model_and_inputs("timm")
    with torch.inference_mode():
        assert_equal(map(model, inputs), expected)
    twin = copy.deepcopy(model).to("meta")
    for x, grid in zip(inputs, [(4, 6), (6, 4)], strict=True):
        assert twin(x.to("meta")).shape == (2, 5)
        assert irpe.summary(twin).attentions[0].grid == grid


def test_a_second_encoding_follows_the_same_grid():
    model = irpe.equip(make_timm(), "cross-bias-k", layers=[0])
    perturb(irpe.equip(model, SPEC, layers=[1]))
    grids = []
    for x in (images(32, 48), images(48, 32)):
        model(x)
        grids += [attention.grid for attention in irpe.summary(model).attentions]
    assert grids == [(4, 6), (4, 6), (6, 4), (6, 4)]


def test_blocks_keep_the_names_of_their_classes():
    model = irpe.equip(make_timm(), SPEC)
    plain = make_timm()
    for block, stock in zip(model.blocks, plain.blocks, strict=True):
        assert isinstance(block, type(stock))
        assert type(block).__name__ == type(stock).__name__
    assert isinstance(model.blocks, nn.Sequential)


def test_the_copy_of_a_part_of_a_model_takes_the_grid_of_that_model():
    """As PEFT copies modules that it saves; the copy of a whole model has a grid of its own."""
    model, inputs, expected = model_and_inputs("timm", depth=1)
    twin = copy.deepcopy(model)
    model.blocks[0].attn = copy.deepcopy(model.blocks[0].attn)
    assert_equal(map(model, inputs), expected)
    assert_equal(map(twin, inputs), expected)
    assert irpe.summary(model).attentions[0].grid == irpe.summary(twin).attentions[0].grid
    model(inputs[0])
    assert irpe.summary(model).attentions[0].grid != irpe.summary(twin).attentions[0].grid


def checkpoint_attentions(model):
    is_attention = lambda module: isinstance(module, Attention)  # noqa: E731
    apply_activation_checkpointing(model, check_fn=is_attention)
    return nullcontext()


def checkpoint_with_copies(model):
    model.set_grad_checkpointing()
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)


@pytest.mark.parametrize("checkpoint", [checkpoint_attentions, checkpoint_with_copies])
def test_a_grid_that_checkpointing_loses_is_an_error_where_it_is_not_the_only_one(checkpoint):
    for sizes in ([(48, 32), (64, 32)], [(48, 32), (32, 48)]):
        inputs = [images(*size) for size in sizes]
        model = perturb(irpe.equip(make_timm(), SPEC)).train()
        expected = gradients_of(model, inputs, torch.Tensor.backward)
        with checkpoint(model):
            if sizes[1] == (64, 32):
                actual = gradients_of(model, inputs, torch.Tensor.backward)
                assert_equal(actual.values(), expected.values())
            else:
                with pytest.raises(RuntimeError, match="the grid of these tokens is lost"):
                    gradients_of(model, inputs, torch.Tensor.backward)


def test_a_buffer_that_is_written_again_has_the_grid_of_its_new_tokens():
    model, inputs, _ = model_and_inputs("timm")

    def tokens(index):
        return model._pos_embed(model.patch_embed(inputs[index]))

    with torch.no_grad():
        expected = model.blocks(tokens(1))
        buffer = tokens(0).clone()
        model.blocks(buffer)
        buffer.copy_(tokens(1))
        assert_equal([model.blocks(buffer)], [expected])


class BlocksFirst(nn.Module):
    """Names the blocks of a model before the model, so that they are copied first."""

    def __init__(self, model):
        super().__init__()
        self.blocks, self.model = model.blocks, model

    def forward(self, x):
        return self.model(x)


def test_a_copy_whose_blocks_are_copied_before_their_model():
    model, inputs, expected = model_and_inputs("timm")
    twin = copy.deepcopy(BlocksFirst(model))
    assert_equal([twin(x) for x in inputs], expected)
    model(inputs[0])  # announces nothing to the copy
    assert_equal([twin(inputs[1])], [expected[1]])
