"""What holds for every family of transformers' models that can be equipped."""

import copy
import functools
import pickle

import pytest
import torch
from adapters.hosts.transformers.families import FAMILIES, predict
from adapters.small_models import state_of, unseen_spec
from torch.nn.functional import normalize

import irpe
from irpe.adapters.equipped import equipped_attentions, table_names
from irpe.adapters.grids import recorded_grid

SPEC = "product-contextual-qkv"
every_family = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)


def some_families(*names):
    """The rest is slow."""
    marks = {name: () if name in names else pytest.mark.slow for name in FAMILIES}
    return pytest.mark.parametrize(
        "family", [pytest.param(FAMILIES[n], id=n, marks=marks[n]) for n in FAMILIES]
    )


def randomize(model, std=0.5):
    generator = torch.Generator().manual_seed(3)
    for name in table_names(model):
        torch.nn.init.normal_(model.get_parameter(name), std=std, generator=generator)
    return model


def equipped(family, spec=SPEC, **arguments):
    return randomize(irpe.equip(family.make(), spec, **arguments))


def gradients(model, inputs):
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)  # for dropout, drop path and augmented rotations
    out = predict(model, inputs)
    (out * torch.linspace(-1, 1, len(out), dtype=out.dtype)).sum().backward()
    named = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"out": out.detach(), **named}


def assert_same(actual, expected, **tolerance):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **tolerance, msg=name)


@every_family
def test_zero_tables_change_nothing_and_random_ones_do(family):
    model, inputs = family.make().double(), family.inputs(dtype=torch.float64)
    expected = gradients(model, inputs)
    irpe.equip(model, SPEC)
    actual = gradients(model, inputs)
    tables = {name: actual.pop(name) for name in list(actual) if ".rpe." in name}
    assert set(tables) == set(table_names(model))
    assert all(grad.any() for name, grad in tables.items() if "value_tables" in name)
    assert_same(actual, expected, rtol=family.rtol, atol=0.01 * family.rtol)
    assert (predict(randomize(model), inputs) - expected["out"]).abs().max() > 0.005


@some_families("DINOv3", "CLIP", "YOLOS", "RT-DETR", "ViTDet", "Swin v2")
def test_the_grid_follows_the_input(family):
    model = equipped(family)
    for size, grid in family.sizes.items():
        inputs = family.inputs(size)
        actual = predict(model, inputs)
        attentions = irpe.summary(model).attentions
        assert attentions[-1].num_prefix_tokens == family.prefix
        assert attentions[-1].grid == grid
        if family.takes_grid:
            other = irpe.equip(family.make(), SPEC, grid=grid)
            other.load_state_dict(model.state_dict())
            assert torch.equal(predict(other, inputs), actual)


def calls_of(model, inputs):
    """How the equipped attentions are called: module, arguments, named arguments, output."""
    calls = []
    for attention in equipped_attentions(model).values():
        attention.register_forward_hook(lambda *call: calls.append(call), with_kwargs=True)
    predict(model, inputs)
    return calls


def heads(attention, x, values, grid):
    """Queries, keys and values of an attention, by its projections."""
    for names in (("q_proj", "k_proj", "v_proj"), ("query", "key", "value")):
        if hasattr(attention, names[0]):
            q, k, v = (attention.get_submodule(name) for name in names)
            keys = x
            if not isinstance(grid, tuple):
                keys = values = reduced(attention, x, grid)
            parts = q(x), k(keys), v(values)
            break
    else:
        parts = attention.qkv(x.flatten(1, 2)).chunk(3, dim=-1)
    num_heads, dim = attention.rpe.size.num_heads, attention.rpe.size.head_dim
    q, k, v = (part.unflatten(-1, (-1, dim)).transpose(1, 2) for part in parts)
    k, v = (part.repeat_interleave(num_heads // part.shape[1], dim=1) for part in (k, v))
    if hasattr(attention, "q_norm"):
        q, k = attention.q_norm(q), attention.k_norm(k)
    return q, k, v


def reduced(attention, x, positions):
    """The tokens that are keys where these are fewer than the queries."""
    names = ("sr", "sequence_reduction", "spatial_reduction")
    layer = next((attention._modules[name] for name in names if name in attention._modules), None)
    if layer is None:
        return x
    maps = x.transpose(1, 2).unflatten(2, positions.sides[0].shape)
    if hasattr(attention, "pool"):
        maps = attention.pool(maps)
    tokens = attention.layer_norm(layer(maps).flatten(2).transpose(1, 2))
    return attention.act(tokens) if hasattr(attention, "act") else tokens


def own_scores(attention, q, grid):
    """What the attention of SAM, ViTDet or Swin v2 adds to its scaled scores."""
    if getattr(attention, "rel_pos_h", None) is not None:
        row, column = (torch.arange(grid[0] * grid[1]) // grid[1] for _ in range(2))
        column = torch.arange(grid[0] * grid[1]) % grid[1]
        vectors = []
        for r, place, size in zip(
            (attention.rel_pos_h, attention.rel_pos_w), (row, column), grid, strict=True
        ):
            length = 2 * size - 1
            r = torch.nn.functional.interpolate(r.T[None], size=length, mode="linear")[0].T
            vectors.append(r[place[:, None] - place + size - 1])
        return torch.einsum("bhid,ijd->bhij", q, sum(vectors))
    if hasattr(attention, "continuous_position_bias_mlp"):
        table = attention.continuous_position_bias_mlp(attention.relative_coords_table)
        table = 16 * table.sigmoid().view(-1, q.shape[1])
        return table[attention.relative_position_index].permute(2, 0, 1)
    if hasattr(attention, "relative_position_bias_table"):
        table = attention.relative_position_bias_table
        return table[attention.relative_position_index].permute(2, 0, 1)
    if getattr(attention, "has_relative_position_bias", False):
        return attention.relative_position_bias(grid, dim_size=q.shape[2])
    return 0


def by_hand(attention, hidden_states, attention_mask=None, position_embeddings=None, **_):
    """An attention with the scores of a `RelativePositionEncoding` that is called by hand."""
    x, rotation = hidden_states, None
    if isinstance(position_embeddings, tuple):
        rotation = position_embeddings
    elif position_embeddings is not None:
        x = x + position_embeddings
    grid = recorded_grid(attention)
    q, k, v = heads(attention, x, hidden_states, grid)
    scale = q.shape[-1] ** -0.5
    size = attention.rpe.size
    if hasattr(attention, "logit_scale"):
        q, k, scale = normalize(q, dim=-1), normalize(k, dim=-1), attention.logit_scale.exp()
    encoding = irpe.RelativePositionEncoding(
        attention.rpe.spec, size.num_heads, size.head_dim, size.num_prefix_tokens
    )
    encoding.load_state_dict(attention.rpe.state_dict())
    order = vars(attention).get("rpe_order")
    if order is not None:
        order = order(q.shape[2], grid)
        inverse = order.argsort()
        b = encoding.scores(q[:, :, order], k[:, :, order], grid=grid)[:, :, inverse][..., inverse]
    else:
        b = encoding.scores(q, k, grid=grid)
    own = own_scores(attention, q, grid)
    if rotation is not None:
        q, k = (rotated(tokens, *rotation) for tokens in (q, k))
    e = (q @ k.mT + b) * scale + own
    if attention_mask is not None:
        mask = attention_mask
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
        if mask.ndim == 3:  # of shifted windows, which Swin v2 adds twice
            mask = mask.repeat(len(e) // len(mask), 1, 1).unsqueeze(1)
            mask = 2 * mask if hasattr(attention, "logit_scale") else mask
        e = e + mask
    z = (e.softmax(-1) @ v).transpose(1, 2).flatten(2)
    z = z.unflatten(1, grid) if hidden_states.ndim == 4 else z
    for name in ("o_proj", "out_proj", "proj"):
        if hasattr(attention, name):
            return getattr(attention, name)(z)
    return z


def rotated(tokens, cos, sin):
    """Pairs of elements (i, i + d / 2) of the patches turned by their angle."""
    patches = tokens[:, :, -len(cos) :]
    first, second = patches.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return torch.cat([tokens[:, :, : -len(cos)], patches * cos + turned * sin], dim=2)


@every_family
def test_attentions_use_the_scores_of_an_encoding_called_by_hand(family):
    model = equipped(family, "product-contextual-qk@clip2+unshared")
    calls = calls_of(model, family.inputs())
    assert len(calls) >= 2
    for attention, args, kwargs, output in calls:
        kwargs = {name.replace("hidden_state", "x"): value for name, value in kwargs.items()}
        x = args[0] if args else kwargs.pop("xs", kwargs.pop("x", None))
        masks = [each for each in args[1:] if isinstance(each, torch.Tensor)]
        named = {"attention_mask": masks[0]} if masks else {}
        expected = by_hand(attention, x, **named, **kwargs)
        torch.testing.assert_close(output[0], expected, rtol=1e-3, atol=1e-4)


@some_families("DINOv3", "YOLOS", "SAM", "Swin v2")
def test_copies_and_pickles_are_equal(family):
    model, inputs = equipped(family), family.inputs()
    others = [copy.deepcopy(model)]
    if "Backbone" not in type(model).__name__:  # backbones have hooks that cannot be pickled
        others.append(pickle.loads(pickle.dumps(model)))
    expected = predict(model, inputs)
    for other in others:
        assert torch.equal(predict(other, inputs), expected)
        assert str(irpe.summary(other)) == str(irpe.summary(model))


@some_families("DINOv3", "SigLIP", "RT-DETR", "SAM, eager", "Swin v2")
def test_saved_models_are_loaded_with_their_tables(family, tmp_path):
    model, inputs = equipped(family), family.inputs()
    expected = predict(model, inputs)
    irpe.save_equipped(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    plain = None if family.is_described else family.make()
    ours = irpe.load_equipped(tmp_path / "ours", plain)
    theirs = irpe.load_equipped(tmp_path / "theirs")
    assert torch.equal(predict(ours, inputs), expected)
    torch.testing.assert_close(predict(theirs, inputs), expected)


@some_families("DINOv3", "CLIP", "Conditional DETR", "ViTDet", "Swin v2")
def test_gradient_checkpointing(family):
    model, inputs = equipped(family).train(), family.inputs()
    if not model.supports_gradient_checkpointing:
        pytest.skip("the library does not checkpoint this model")
    for module in model.modules():
        module.train(not isinstance(module, torch.nn.BatchNorm2d))
    expected = gradients(model, inputs)
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": False})
    predict(model, family.inputs(list(family.sizes)[-1]))  # another grid in between
    assert_same(gradients(model, inputs), expected)


@some_families()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # of dynamo, where a host breaks graphs
def test_compile(family):
    torch._dynamo.reset()
    model, inputs = equipped(family, unseen_spec()), family.inputs()
    expected = gradients(model, inputs)
    compiled = torch.compile(model, backend="aot_eager")
    model.zero_grad()
    actual = gradients(Compiled(model, compiled), inputs)
    scale = max(float(value.abs().max()) for value in expected.values())
    assert_same(actual, expected, rtol=1e-3, atol=1e-5 * scale)
    torch._dynamo.reset()


class Compiled:
    """A compiled model whose parameters have the names of the plain one."""

    def __init__(self, model, compiled):
        self.zero_grad, self.named_parameters = model.zero_grad, model.named_parameters
        self.compiled = compiled

    def __call__(self, **inputs):
        return self.compiled(**inputs)


@every_family
def test_wrong_arguments_leave_the_model_unchanged(family):
    model = family.make()
    before, config = state_of(model), dict(vars(model.config))
    wrong = ({"layers": [99]}, {"absolute": "learned"}, {"builtin_bias": "none"})
    for arguments in (*wrong, {"builtin_bias": "convert"}):
        with pytest.raises(ValueError, match=r"99|is not one of|convert"):
            irpe.equip(model, SPEC, **arguments)
        assert state_of(model) == before
        assert dict(vars(model.config)) == config
    irpe.equip(model, SPEC)
    before = state_of(model)
    with pytest.raises(ValueError, match="already equipped"):
        irpe.equip(model, SPEC)
    assert state_of(model) == before


@some_families("DINOv3", "YOLOS", "RT-DETR", "SAM, eager", "Swin v2")
def test_weights_are_returned_when_they_are_asked_for(family):
    model, plain = irpe.equip(family.make(), SPEC), family.make()
    name = "encoder_attentions" if hasattr(plain.config, "encoder_layers") else "attentions"
    if family is FAMILIES["SAM"]:
        pytest.skip("the library returns no weights")
    for each in (model, plain):
        if each.config._attn_implementation != "eager":
            each.set_attn_implementation("eager")
    ask = functools.partial(dict, family.inputs(), output_attentions=True)
    expected = plain(**ask())[name]
    actual = model(**ask())[name]
    assert len(actual) == len(expected) > 0
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-5)
    assert (randomize(model)(**ask())[name][0] - actual[0]).abs().max() > 0.01
