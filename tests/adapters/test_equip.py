import copy
from dataclasses import replace

import pytest
import timm
import torch
import transformers
from adapters.hosts.table import make_swin as make_swin_of_transformers
from adapters.small_models import (
    gradients,
    images,
    make_encoder,
    make_swin,
    make_vit,
    perturb,
    state_of,
    tokens,
)
from timm.layers.attention import Attention
from timm.models.swin_transformer import WindowAttention
from torch import nn

import irpe
from irpe.adapters.checks import check_rotation
from irpe.adapters.host import Site

SPEC = "product-contextual-qkv"


def equipped_vit(spec=SPEC, **arguments):
    """A vision transformer with random tables."""
    return perturb(irpe.equip(make_vit(**arguments), spec))


def names(model):
    return [attention.name for attention in irpe.summary(model).attentions]


def assert_same(actual, expected, **tolerance):
    assert list(actual) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, **tolerance, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, [0, 1, 2]),
        ([1], [1]),
        ([-1], [2]),
        ((2, 0), [0, 2]),
        ((0, -3), [0]),
        (range(1, 3), [1, 2]),
        (iter([2]), [2]),
    ],
    ids=["all", "one", "last", "any order", "negative", "range", "iterator"],
)
def test_layers_are_counted_from_the_input(layers, expected):
    model, x = make_vit(depth=3), images()
    plain = copy.deepcopy(model)
    assert irpe.equip(model, SPEC, layers=layers) is model
    assert names(model) == [f"blocks.{number}.attn" for number in expected]
    torch.testing.assert_close(model(x), plain(x))
    for number in range(3):
        is_plain = type(model.blocks[number].attn) is Attention
        assert is_plain == (number not in expected)


WRONG = [
    ({"layers": [2]}, r"\[2\].*0 to 1"),
    ({"layers": [0, 9]}, r"\[9\].*0 to 1"),
    ({"layers": [-3]}, r"\[-3\].*0 to 1"),
    ({"layers": []}, "None for all"),
    ({"layers": ["0"]}, "'0'"),
    ({"layers": [True]}, "True"),
    ({"layers": [1.0]}, r"1\.0"),
    ({"layers": 1}, "layers"),
    ({"spec": "produkt-contextual-k"}, "did you mean 'product'"),
    ({"spec": "product-bias-v"}, "bias"),
    ({"spec": None}, "METHOD-MODE-TARGETS"),
    ({"absolute": "learned"}, "'learned' is not one of keep, none, sinusoid"),
    ({"builtin_bias": "remove"}, "'remove' is not one of keep, drop"),
    ({"num_prefix_tokens": -1}, "-1"),
    ({"impl": "fused"}, "'fused' is not one of auto, reference"),
    ({"spec": "cpvt", "impl": "reference"}, "'reference': encoding 'cpvt' leaves attention"),
    ({"spec": "none", "impl": "reference"}, "'reference': encoding 'none' leaves attention"),
    ({"num_prefix_tokens": True}, "True"),
    ({"grid": (4, 0)}, r"\(4, 0\)"),
    ({"grid": "4x4"}, "4x4"),
    (
        {"grid": (2, 8)},
        r"grid \(2, 8\): the model takes images of one size, whose grid is \(4, 4\)",
    ),
    ({"grid": (3, 5)}, r"whose grid is \(4, 4\)"),
    ({"builtin_bias": "drop"}, "'drop': VisionTransformer has no relative encoding of its own"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[str(case[0]) for case in WRONG])
def test_wrong_arguments_leave_the_model_unchanged(arguments, message):
    check_unchanged(make_vit(), arguments, message)


HALF_WAY = {
    "a bias to drop and no encoding": (
        make_swin,
        {"spec": "none", "builtin_bias": "drop"},
        "'drop': encoding 'none' leaves attention as it is",
    ),
    "a bias that is no vector for each offset": (
        make_swin,
        {"builtin_bias": "convert"},
        "'convert': the relative encoding of SwinTransformer is not a vector",
    ),
    "no sines for 30 dimensions": (
        lambda: make_vit(embed_dim=30),
        {"absolute": "sinusoid"},
        "dim = 30",
    ),
    "no absolute encoding": (
        lambda: make_vit(pos_embed="none"),
        {"absolute": "none"},
        "no absolute encoding",
    ),
    "no absolute encoding in the second of two": (
        lambda: nn.ModuleList(
            [make_vit("deit_tiny_distilled_patch16_224"), make_vit(pos_embed="none")]
        ),
        {"absolute": "none"},
        "no absolute encoding",
    ),
    "patches dropped in the second of two": (
        lambda: nn.ModuleList([make_vit(), make_vit(patch_drop_rate=0.5)]),
        {"num_prefix_tokens": 3},
        "patch_drop keeps the first tokens",
    ),
    "one block equipped before": (
        lambda: perturb(irpe.equip(make_vit(), "cross-bias-k", layers=[1])),
        {"absolute": "none"},
        r"already equipped: blocks\.1\.attn;",
    ),
    "all blocks equipped before": (equipped_vit, {}, "already equipped"),
    "a grid of torch.nn is missing": (make_encoder, {}, "pass grid="),
}


@pytest.mark.parametrize(("make", "arguments", "message"), HALF_WAY.values(), ids=HALF_WAY)
def test_failures_half_way_leave_the_model_unchanged(make, arguments, message):
    check_unchanged(make(), arguments, message)


def check_unchanged(model, arguments, message):
    def outputs():
        with torch.no_grad():
            if isinstance(model, nn.TransformerEncoder):
                return [model(tokens())]
            return [m(images()) for m in (model if isinstance(model, nn.ModuleList) else [model])]

    expected = outputs()
    before, values = state_of(model), copy.deepcopy(model.state_dict())
    with pytest.raises((TypeError, ValueError), match=message):
        irpe.equip(model, **{"spec": SPEC, **arguments})
    assert state_of(model) == before
    assert_same(model.state_dict(), values, rtol=0, atol=0)
    for out, plain in zip(outputs(), expected, strict=True):
        assert torch.equal(out, plain)


def test_a_failure_in_the_last_step_leaves_the_model_unchanged(monkeypatch):
    model = make_swin_of_transformers()
    before = state_of(model)

    def fail(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr("irpe.adapters.hosts.transformers.write_config", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            irpe.equip(model, SPEC, builtin_bias="drop")
    assert state_of(model) == before
    irpe.equip(model, SPEC, builtin_bias="drop")
    assert state_of(model) != before


@pytest.mark.parametrize("model", [nn.Linear(2, 2), nn.TransformerDecoderLayer(16, 2)], ids=repr)
def test_the_error_for_other_models_is_short_and_says_where_supported_ones_are_listed(model):
    with pytest.raises(ValueError, match="cannot be equipped") as error:
        irpe.equip(model, SPEC, grid=(2, 3))
    told = str(error.value)
    assert told.startswith(type(model).__name__)
    assert "irpe models and docs/reference/supported-models.md" in told
    assert len(told) < 400
    assert ("has no self-attention" in told) == isinstance(model, nn.Linear)


@pytest.mark.parametrize("grid", [None, (4, 4)])
def test_attention_that_pools_is_not_offered(grid):
    """SigLIP's head is the only one of torch.nn in it, and it is cross-attention."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.SiglipVisionConfig(
        **sizes, num_attention_heads=2, image_size=32, patch_size=8
    )
    model = transformers.SiglipVisionModel(config)
    with pytest.raises(ValueError, match="it has no self-attention") as error:
        irpe.equip(model.head, SPEC, grid=grid)
    assert "pass grid=" not in str(error.value)
    irpe.equip(model, SPEC, grid=grid)
    assert [each.name for each in irpe.summary(model).attentions] == ["encoder.layers.0.self_attn"]
    assert type(model.head.attention) is nn.MultiheadAttention


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_projections_are_refused():
    model = make_vit()
    for block in model.blocks:
        plain, attention = block.attn.qkv, block.attn
        attention.qkv = torch.ao.nn.quantized.dynamic.Linear(*plain.weight.shape[::-1])
        weight = torch.quantize_per_tensor(plain.weight.detach(), 0.01, 0, torch.qint8)
        attention.qkv.set_weight_bias(weight, plain.bias.detach())
    before, expected = state_of(model), model(images())
    message = r"blocks\.0\.attn\.qkv is a torch\..*Linear, whose weights are quantised: equip the"
    with pytest.raises(ValueError, match=message):
        irpe.equip(model, SPEC)
    assert state_of(model) == before
    assert torch.equal(model(images()), expected)


def test_a_host_that_rotates_takes_no_encoding_that_rotates():
    attention = nn.Identity()
    sites = [Site("blocks.0.attn", attention, 2, 8)]
    rotary = irpe.parse_encoding("rope-axial")
    check_rotation(sites, rotary)
    sites = [replace(site, rotates=True) for site in sites]
    check_rotation(sites, irpe.RPESpec())
    with pytest.raises(ValueError, match=r"'rope-axial@100' rotates .* as blocks\.0\.attn does"):
        check_rotation(sites, rotary)
    with pytest.raises(ValueError, match=r"rope-axial.*decomposed.* rotates .* as blocks\.0"):
        check_rotation(sites, irpe.parse_encoding("rope-axial+decomposed"))
    with pytest.raises(ValueError, match=r"'transformer-xl' shifts .* blocks\.0\.attn rotates"):
        check_rotation(sites, irpe.parse_encoding("transformer-xl"))


def test_something_that_is_no_module_is_refused():
    with pytest.raises(TypeError, match="model is a str"):
        irpe.equip("vit_tiny", SPEC)


class OwnAttention(Attention):
    def forward(self, *arguments, **options):
        return -super().forward(*arguments, **options)


class OwnWindowAttention(WindowAttention):
    def forward(self, *arguments, **options):
        return -super().forward(*arguments, **options)


class OwnMultiheadAttention(nn.MultiheadAttention):
    def forward(self, *arguments, **options):
        out, weights = super().forward(*arguments, **options)
        return -out, weights


def with_own_window_attention():
    swin = make_swin()
    swin.layers[0].blocks[0].attn.__class__ = OwnWindowAttention
    return swin


@pytest.mark.parametrize(
    ("make", "arguments", "name"),
    [
        (lambda: make_vit(attn_layer=OwnAttention), {}, "OwnAttention"),
        (with_own_window_attention, {}, "OwnWindowAttention"),
        (lambda: OwnMultiheadAttention(16, 2), {"grid": (2, 3)}, "OwnMultiheadAttention"),
    ],
    ids=["vit", "swin", "torch.nn"],
)
def test_attentions_with_a_forward_of_their_own_are_refused(make, arguments, name):
    model = make()
    before = state_of(model)
    with pytest.raises(ValueError, match=name):
        irpe.equip(model, SPEC, **arguments)
    assert state_of(model) == before


@pytest.mark.parametrize("find", [lambda model: model.blocks[1].attn, lambda m: m.blocks[1]])
def test_a_forward_set_on_an_instance_is_refused(find):
    model = make_vit(dynamic_img_size=True)
    module = find(model)
    module.forward = module.forward  # as hooks of Accelerate do
    with pytest.raises(ValueError, match=r"a forward set on the instance.*equip the model first"):
        irpe.equip(model, SPEC)
    assert not any(hasattr(block.attn, "rpe") for block in model.blocks)


def test_attentions_of_another_library_are_named():
    model = nn.Sequential(make_vit(), make_swin_of_transformers())
    with pytest.warns(UserWarning, match=r"4 attentions of another library stay.*1\.swin\.encoder"):
        irpe.equip(model, SPEC)
    assert all(name.startswith("0.") for name in names(model))


def test_blocks_can_differ_in_their_encodings():
    model, x = make_vit(), images()
    expected = model(x)
    irpe.equip(model, "product-contextual-k", layers=[0])
    irpe.equip(model, "cross-bias-k+unshared", layers=[1])
    torch.testing.assert_close(model(x), expected)
    assert [a.spec for a in irpe.summary(model).attentions] == [
        "product-contextual-k@1.9",
        "cross-bias-k@20+unshared",
    ]
    table_names = {name for name in model.state_dict() if "rpe" in name}
    assert len(table_names) == 3
    assert table_names <= model.no_weight_decay()
    assert not torch.equal(perturb(model)(x), expected)


def test_absolute_can_be_chosen_again_for_other_blocks():
    model, once = make_vit(), make_vit()
    for layer in (0, 1):
        irpe.equip(model, SPEC, layers=[layer], absolute="none")
    irpe.equip(once, SPEC, absolute="none")
    assert list(model.state_dict()) == list(once.state_dict())
    assert torch.equal(model(images()), once(images()))


def test_two_models_inside_one():
    pair = nn.ModuleDict({"student": make_vit(img_size=(16, 64)), "teacher": make_vit()})
    plain = copy.deepcopy(pair)
    irpe.equip(pair, SPEC)
    assert names(pair)[:3] == [
        "student.blocks.0.attn",
        "student.blocks.1.attn",
        "teacher.blocks.0.attn",
    ]
    for name, x in (("student", images(16, 64)), ("teacher", images())):
        torch.testing.assert_close(pair[name](x), plain[name](x))
    assert [a.grid for a in irpe.summary(pair).attentions] == [(2, 8)] * 2 + [(4, 4)] * 2


def test_state_dict_round_trip():
    model, plain = equipped_vit(), make_vit()
    state = model.state_dict()
    assert [name for name in state if name not in plain.state_dict()] == [
        f"blocks.{n}.attn.rpe.{role}_tables.0" for n in (0, 1) for role in ("query", "key", "value")
    ]
    assert set(plain.state_dict()) <= set(state)
    fresh = irpe.equip(perturb(make_vit(), seed=7), SPEC)
    fresh.load_state_dict(state)
    assert torch.equal(fresh(images()), model(images()))


def test_equipping_keeps_mode_device_and_dtype():
    for model in (make_vit().train(), make_vit().double(), make_vit()):
        irpe.equip(model, SPEC)
        qkv, table = model.blocks[0].attn.qkv.weight, model.blocks[0].attn.rpe.key_tables[0]
        assert table.dtype == qkv.dtype
        assert model.blocks[0].attn.rpe.training == model.training
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", depth=1)
    assert irpe.equip(model, SPEC).blocks[0].attn.rpe.key_tables[0].is_meta


def test_tables_made_in_inference_mode_can_be_trained():
    model = make_vit()
    with torch.inference_mode():
        irpe.equip(model, SPEC, absolute="sinusoid")
    actual = gradients(perturb(model), images())
    assert actual["blocks.0.attn.rpe.key_tables.0"].abs().max() > 0


def test_distributed_data_parallel(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = equipped_vit().train()
        expected = gradients(model, images())
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert_same(gradients(model, images(), wrapped), expected)
        assert expected["blocks.0.attn.rpe.key_tables.0"].abs().max() > 0
        with pytest.raises(ValueError, match=r"a DistributedDataParallel.*equip the model first"):
            irpe.equip(nn.parallel.DistributedDataParallel(make_vit()), SPEC)
    finally:
        torch.distributed.destroy_process_group()
