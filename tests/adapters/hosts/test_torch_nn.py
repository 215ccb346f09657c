import functools
import itertools

import oracles
import pytest
import torch
from adapters.small_models import (
    gradients,
    make_encoder,
    make_layer,
    perturb,
    state_of,
    tokens,
    unseen_spec,
)
from torch import nn

import irpe

SPEC = "product-contextual-qkv"
GRID = (2, 3)
HEADS, DIM, COUNT = 2, 16, 6


def make_attention(**arguments):
    torch.manual_seed(0)
    return perturb(nn.MultiheadAttention(DIM, HEADS, **arguments).eval())


def boolean(*shape):
    """True where a key does not take part; the first key always does."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(2)) > 0.6
    mask[..., 0] = False
    return mask


def additive(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(2))


PAIRS, PER_HEAD, KEYS = (COUNT, COUNT), (2 * HEADS, COUNT, COUNT), (2, COUNT)
MASKS = {
    "none": {},
    "boolean": {"attn_mask": boolean(*PAIRS)},
    "additive": {"attn_mask": additive(*PAIRS)},
    "boolean per head": {"attn_mask": boolean(*PER_HEAD)},
    "additive per head": {"attn_mask": additive(*PER_HEAD)},
    "boolean padding": {"key_padding_mask": boolean(*KEYS)},
    "additive padding": {"key_padding_mask": additive(*KEYS)},
    "both boolean": {"attn_mask": boolean(*PAIRS), "key_padding_mask": boolean(*KEYS)},
    "both additive": {"attn_mask": additive(*PER_HEAD), "key_padding_mask": additive(*KEYS)},
}
WEIGHTS = {
    "weights": {},
    "weights per head": {"average_attn_weights": False},
    "no weights": {"need_weights": False},
}


def of_first_sample(masks):
    """The masks of an input without a batch."""
    sizes = {"attn_mask": HEADS, "key_padding_mask": 1}
    return {
        name: mask if mask.shape == PAIRS else mask[: sizes[name]].squeeze(0)
        for name, mask in masks.items()
    }


def call(attention, x, **arguments):
    return attention(x, x, x, **arguments)


def assert_same_results(actual, expected):
    for a, e in zip(actual, expected, strict=True):
        assert (a is None) == (e is None)
        if e is not None:
            torch.testing.assert_close(a, e)


SHAPES = ["batch first", "batch second", "no batch"]
# Every pair of a shape, a mask and a kind of weights.
CALLS = [
    (shape, mask, list(WEIGHTS)[(i + j) % len(WEIGHTS)])
    for i, shape in enumerate(SHAPES)
    for j, mask in enumerate(MASKS)
]


@pytest.mark.parametrize(("shape", "mask", "kind"), CALLS)
def test_zero_tables_change_nothing(shape, mask, kind):
    masks, weights = MASKS[mask], WEIGHTS[kind]
    options = {"batch_first": shape == "batch first"}
    plain, attention = make_attention(**options), make_attention(**options)
    irpe.equip(attention, SPEC, grid=GRID)
    x = tokens()
    if shape == "batch second":
        x = x.transpose(0, 1)
    if shape == "no batch":
        x, masks = x[0], of_first_sample(masks)
    expected = call(plain, x, **masks, **weights)
    assert_same_results(call(attention, x, **masks, **weights), expected)
    changed = call(perturb(attention, seed=3), x, **masks, **weights)
    assert not torch.allclose(changed[0], expected[0], atol=1e-2)


@pytest.mark.parametrize("arguments", [{"bias": False}, {"dtype": torch.float64}], ids=str)
def test_zero_tables_change_nothing_in_other_attentions(arguments):
    x = tokens().to(arguments.get("dtype", torch.float32))
    expected = call(make_attention(**arguments), x.transpose(0, 1))
    attention = irpe.equip(make_attention(**arguments), SPEC, grid=GRID)
    assert_same_results(call(attention, x.transpose(0, 1)), expected)


def test_masks_of_two_kinds_are_joined():
    attention = perturb(irpe.equip(make_attention(batch_first=True), SPEC, grid=GRID))
    pairs, keys = boolean(*PAIRS), boolean(*KEYS)
    as_numbers = torch.zeros(KEYS).masked_fill(keys, -torch.inf)
    expected = call(attention, tokens(), attn_mask=pairs, key_padding_mask=keys)
    actual = call(attention, tokens(), attn_mask=pairs, key_padding_mask=as_numbers)
    assert_same_results(actual, expected)


def test_a_padded_key_has_no_weight():
    attention = perturb(irpe.equip(make_attention(batch_first=True), SPEC, grid=GRID))
    padding = boolean(*KEYS)
    assert padding.any()
    _, weights = call(attention, tokens(), key_padding_mask=padding)
    is_zero = (weights == 0).all(dim=1)
    assert torch.equal(is_zero, padding)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("method", oracles.METHODS)
@pytest.mark.parametrize("mode", ["contextual-qkv", "bias-k"])
def test_random_tables_give_what_the_papers_equations_give(method, mode, prefix):
    spec = f"{method}-{mode}@clip2+unshared"
    attention = make_attention(batch_first=True, dtype=torch.float64)
    perturb(irpe.equip(attention, spec, grid=GRID, num_prefix_tokens=prefix), seed=3)
    x = tokens(prefix + COUNT).double()
    out, weights = call(attention, x, average_attn_weights=False)
    index = functools.partial(oracles.clip, beta=2)
    ids, _ = oracles.bucket_ids(method, GRID, prefix, index, 2)
    qkv = nn.functional.linear(x, attention.in_proj_weight, attention.in_proj_bias)
    q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
    z, expected = torch.empty_like(q), torch.empty_like(weights)
    for sample, head in itertools.product(range(2), range(HEADS)):
        tables = {
            role: [table[head].tolist() for table in getattr(attention.rpe, f"{role}_tables")]
            for role in ("query", "key", "value", "bias")
            if len(getattr(attention.rpe, f"{role}_tables"))
        }
        vectors = (part[sample, head].tolist() for part in (q, k, v))
        result = oracles.attention(*vectors, ids, tables, (DIM // HEADS) ** -0.5)
        z[sample, head], expected[sample, head] = map(z.new_tensor, result[:2])
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(out, attention.out_proj(z.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("grid", [(6,), (3, 2), (1, 2, 3)])
def test_grids_of_any_number_of_axes(grid):
    attention = irpe.equip(make_attention(batch_first=True), SPEC, grid=grid)
    expected = call(make_attention(batch_first=True), tokens())
    assert_same_results(call(attention, tokens()), expected)
    assert irpe.summary(attention).attentions[0].grid == grid


LAYERS = {
    "layer": (make_layer, {}),
    "layer, batch second": (make_layer, {"batch_first": False}),
    "layer, norm first": (make_layer, {"norm_first": True}),
    "layer, gelu": (make_layer, {"activation": "gelu"}),
    "encoder": (make_encoder, {}),
    "encoder, batch second": (make_encoder, {"batch_first": False}),
    "encoder with norm": (make_encoder, {"norm": True}),
    "encoder with nested tensors": (make_encoder, {"enable_nested_tensor": True}),
}


def input_of(arguments):
    return tokens() if arguments.get("batch_first", True) else tokens().transpose(0, 1)


@pytest.mark.parametrize(("make", "arguments"), LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("is_training", [True, False], ids=["train", "eval"])
def test_zero_tables_change_nothing_in_layers(make, arguments, is_training):
    plain, model = (make(**arguments).train(is_training) for _ in range(2))
    irpe.equip(model, SPEC, grid=GRID)
    x = input_of(arguments)
    expected, actual = gradients(plain, x), gradients(model, x)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-3, atol=1e-3, msg=name)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("mode", "is_padded"), [(torch.no_grad, True), (torch.inference_mode, False)]
)
@pytest.mark.parametrize(("make", "arguments"), LAYERS.values(), ids=LAYERS)
def test_inference_does_not_pass_the_tables_by(make, arguments, mode, is_padded):
    plain, model, x = make(**arguments), make(**arguments), input_of(arguments)
    perturb(irpe.equip(model, SPEC, grid=GRID), seed=3)
    plain.load_state_dict(model.state_dict(), strict=False)
    padding = torch.tensor([[False] * 6, [False] * 4 + [is_padded] * 2])
    kept = ~padding if arguments.get("batch_first", True) else ~padding.T

    def run(model):  # what becomes of padded tokens is not defined
        return model(x, src_key_padding_mask=padding if is_padded else None)[kept]

    trained = run(model.train())
    model.eval()
    with mode():
        torch.testing.assert_close(run(model), trained, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(run(model), run(plain), atol=1e-2)


def test_export():
    model = perturb(irpe.equip(make_encoder(num_layers=1), unseen_spec(), grid=GRID)).eval()
    dynamic = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(model, (tokens(),), dynamic_shapes=dynamic)
    larger = tokens(batch=5)
    torch.testing.assert_close(program.module()(larger), model(larger), rtol=1e-4, atol=1e-5)
    assert "irpe" not in str(program.graph)


def test_causal_masks_of_an_encoder():
    model, plain = irpe.equip(make_encoder(), SPEC, grid=GRID), make_encoder()
    mask = nn.Transformer.generate_square_subsequent_mask(COUNT)
    expected = plain(tokens(), mask=mask, is_causal=True)
    torch.testing.assert_close(model(tokens(), mask=mask, is_causal=True), expected)
    assert not torch.allclose(model(tokens()), expected, atol=1e-2)


def test_a_causal_hint_without_a_mask_is_refused_as_torch_does():
    for attention in (make_attention(), irpe.equip(make_attention(), SPEC, grid=GRID)):
        with pytest.raises((RuntimeError, ValueError), match="attn_mask"):
            call(attention, tokens().transpose(0, 1), is_causal=True)


def test_dropout_is_for_training_only():
    attention = irpe.equip(make_attention(dropout=0.5), SPEC, grid=GRID)
    x = tokens().transpose(0, 1)
    assert torch.equal(call(attention, x)[0], call(attention, x)[0])
    attention.train()
    assert not torch.equal(call(attention, x)[0], call(attention, x)[0])


@pytest.mark.parametrize("make", [make_attention, make_layer, make_encoder])
def test_the_grid_is_required_and_must_fit(make):
    model = make(batch_first=True)
    with pytest.raises(ValueError, match="pass grid="):
        irpe.equip(model, SPEC)
    irpe.equip(model, SPEC, grid=(2, 2), num_prefix_tokens=1)
    with pytest.raises(ValueError, match="5 patches"):
        call(model, tokens()) if make is make_attention else model(tokens())


def test_of_a_transformer_the_encoder_alone_is_equipped():
    torch.manual_seed(0)
    model = nn.Transformer(DIM, HEADS, 2, 2, 24, dropout=0.0, batch_first=True).eval()
    source, target = tokens(), tokens(4, seed=5)
    expected = model(source, target)
    decoder = state_of(model.decoder)
    irpe.equip(model, SPEC, grid=GRID)
    assert [a.name for a in irpe.summary(model).attentions] == [
        "encoder.layers.0.self_attn",
        "encoder.layers.1.self_attn",
    ]
    assert state_of(model.decoder) == decoder
    torch.testing.assert_close(model(source, target), expected)


def test_cross_attention_is_refused():
    attention = irpe.equip(make_attention(batch_first=True), SPEC, grid=GRID)
    x, other = tokens(), tokens(seed=5)
    for arguments in ((x, other, other), (x, x, other), (x, other, x)):
        with pytest.raises(ValueError, match="cross-attention"):
            attention(*arguments)


REFUSED = [
    ({"add_bias_kv": True}, {}, "add_bias_kv"),
    ({"add_zero_attn": True}, {}, "add_zero_attn"),
    ({"kdim": 8}, {}, "kdim"),
    ({"vdim": 8}, {}, "vdim"),
    ({}, {"absolute": "none"}, "no absolute encoding"),
    ({}, {"absolute": "sinusoid"}, "no absolute encoding"),
]


@pytest.mark.parametrize(("made_with", "arguments", "message"), REFUSED)
def test_attentions_that_are_refused(made_with, arguments, message):
    model = nn.Sequential(make_attention(), make_attention(**made_with))
    before = state_of(model)
    with pytest.raises(ValueError, match=message):
        irpe.equip(model, SPEC, grid=GRID, **arguments)
    assert state_of(model) == before


@pytest.mark.parametrize("made_with", [arguments for arguments, _, _ in REFUSED[:4]], ids=str)
def test_attentions_that_would_be_refused_can_be_left_out(made_with):
    model = nn.Sequential(make_attention(), make_attention(**made_with))
    irpe.equip(model, SPEC, grid=GRID, layers=[0])
    assert [a.name for a in irpe.summary(model).attentions] == ["0"]


def test_tokens_of_another_grid_are_told_what_to_do():
    encoder = irpe.equip(make_encoder(), "product-contextual-k", grid=(2, 3))
    with pytest.raises(irpe.UserError, match=r"12 patches.*grid \(2, 3\).*irpe.unequip"):
        encoder(tokens(12))
    irpe.unequip(encoder)
    assert irpe.equip(encoder, "product-contextual-k", grid=(3, 4))(tokens(12)).shape == (2, 12, 16)
