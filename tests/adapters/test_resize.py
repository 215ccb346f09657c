"""Models set to other sizes, in place: all or nothing, there and back, saved and loaded."""

import copy
import pickle

import pytest
import timm
import torch
from adapters.small_models import make_swin, make_vit, perturb
from timm.layers import resample_abs_pos_embed
from torch import nn

import irpe
from irpe.adapters.equipped import table_names

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
HF = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
HF |= {"image_size": 32, "patch_size": 8}
SAM = {"window_size": 2, "global_attn_indexes": (1,)}


def make_timm(name, **arguments):
    return timm.create_model(name, **{**VIT, "num_classes": 5, **arguments})


def make_hf(name, config, **arguments):
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name)(getattr(transformers, config)(**arguments))


def make_tv(name, *arguments):
    torchvision = pytest.importorskip("torchvision")
    return getattr(torchvision.models, name)(*arguments, num_classes=5)


def make_swin_v2():
    sizes = {"img_size": 32, "depths": (2, 2), "num_heads": (2, 4), "embed_dim": 16}
    return timm.create_model("swinv2_tiny_window8_256", window_size=4, num_classes=5, **sizes)


HOSTS = {
    "timm ViT": make_vit,
    "timm Swin": lambda: make_swin(window_size=4),
    "timm Swin v2": make_swin_v2,
    "timm BEiT": lambda: make_timm("beit_base_patch16_224"),
    "timm SAM": lambda: make_timm("samvit_base_patch16", **SAM),
    "torchvision ViT": lambda: make_tv("VisionTransformer", 32, 8, 2, 2, 32, 32),
    "torchvision Swin": lambda: make_tv("SwinTransformer", [4, 4], 16, [2, 2], [2, 4], [4, 4]),
    "transformers ViT": lambda: make_hf("ViTModel", "ViTConfig", **HF),
    "transformers CLIP": lambda: make_hf("CLIPVisionModel", "CLIPVisionConfig", **HF),
    "transformers DINOv2": lambda: make_hf("Dinov2Model", "Dinov2Config", **HF | {"mlp_ratio": 1}),
    "transformers Swin": lambda: make_hf(
        "SwinModel", "SwinConfig", image_size=32, patch_size=4, embed_dim=16, depths=[2, 2],
        num_heads=[2, 4], window_size=4,
    ),
    "transformers BEiT": lambda: make_hf(
        "BeitModel", "BeitConfig", use_relative_position_bias=True, **HF
    ),
    "transformers SAM": lambda: make_hf(
        "SamVisionModel", "SamVisionConfig", output_channels=8, mlp_dim=32, **SAM, **HF
    ),
    "transformers ViTDet": lambda: make_hf(
        "VitDetModel", "VitDetConfig", pretrain_image_size=32, window_block_indices=[0],
        use_relative_position_embeddings=True, window_size=2, **HF,
    ),
}  # fmt: skip
# The others resample in the same way as one of these.
QUICK = ("timm Swin v2", "timm SAM", "torchvision ViT", "transformers ViT", "transformers Swin")
SQUARES = ("torchvision ViT", "transformers CLIP", "transformers SAM")  # as the library has them


def make(name, equipped=True):
    torch.manual_seed(0)
    model = perturb(HOSTS[name](), size=0.05).eval()
    if equipped:
        irpe.equip(model, "product-contextual-k")
        for table in table_names(model):
            nn.init.normal_(model.get_parameter(table))
    return model


@torch.no_grad()
def run(model, size):
    image = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(1))
    out = model(pixel_values=image) if hasattr(model, "config") else model(image)
    return out if isinstance(out, torch.Tensor) else out[0]


def snapshot(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(state, other):
    assert list(state) == list(other)
    assert all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in HOSTS],
)
def test_there_and_back_saved_and_loaded(name, tmp_path):
    model = make(name)
    before, state, attributes = run(model, (32, 32)), snapshot(model), vars(model).keys()
    size = (64, 64) if name in SQUARES else (40, 64)
    tables = {table: model.get_parameter(table) for table in table_names(model)}
    assert irpe.resize(model, size) is model
    out = run(model, size)
    assert out.isfinite().all()
    assert all(model.get_parameter(table) is tables[table] for table in tables)
    irpe.save_equipped(model, tmp_path / "model")
    assert torch.equal(run(irpe.load_equipped(tmp_path / "model"), size), out)
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    for each in (model, again):
        irpe.resize(each, 32)
        assert_same(each.state_dict(), state)
        assert torch.equal(run(each, (32, 32)), before)
    assert vars(model).keys() == attributes


@pytest.mark.parametrize("name", ["timm ViT", "transformers ViT"])
def test_a_plain_model_is_resized_as_an_equipped_one(name):
    plain, equipped = make(name, equipped=False), make(name)
    for model in (plain, equipped):
        irpe.resize(model, (64, 40))
    irpe.unequip(equipped)
    assert_same(plain.state_dict(), equipped.state_dict())
    assert torch.equal(run(plain, (64, 40)), run(equipped, (64, 40)))
    irpe.resize(equipped, 32)
    assert_same(equipped.state_dict(), make(name, equipped=False).state_dict())


@pytest.mark.parametrize("name", SQUARES)
def test_squares_alone_where_the_library_has_no_other(name):
    model = make(name)
    state, before = snapshot(model), run(model, (32, 32))
    with pytest.raises(
        irpe.UserError, match=r"cannot be had at 32 x 64 pixels: .*64 x 64 would do"
    ):
        irpe.resize(model, (32, 64))
    assert_same(model.state_dict(), state)
    assert torch.equal(run(model, (32, 32)), before)


@pytest.mark.parametrize("absolute", ["keep", "none", "sinusoid"])
def test_the_absolute_encoding(absolute, tmp_path):
    model = irpe.equip(make_vit(), "product-contextual-k", absolute=absolute)
    learned = make_vit().pos_embed
    irpe.resize(model, (40, 64))
    expected = irpe.equip(make_vit(img_size=(40, 64)), "product-contextual-k", absolute=absolute)
    if absolute == "keep":
        resampled = resample_abs_pos_embed(learned, (5, 8), (4, 4))
        torch.testing.assert_close(model.pos_embed, resampled)
        assert model.pos_embed.requires_grad
    else:
        assert torch.equal(model.pos_embed, expected.pos_embed)
    irpe.save_equipped(model, tmp_path / "model")
    loaded = irpe.load_equipped(tmp_path / "model")
    irpe.resize(loaded, 32)
    irpe.resize(model, 32)
    if absolute == "keep":  # the saved one does not know what it was resampled from
        assert torch.equal(model.pos_embed, learned)
        assert not torch.equal(loaded.pos_embed, learned)
    else:
        assert_same(loaded.state_dict(), model.state_dict())
        with pytest.raises(irpe.UserError, match="no absolute encoding any more"):
            irpe.unequip(loaded)


def test_what_was_learned_since_is_resampled():
    model = make_vit()
    irpe.resize(model, 64)
    with torch.no_grad():
        model.pos_embed.add_(1)
    learned = model.pos_embed.detach().clone()
    irpe.resize(model, 32)
    torch.testing.assert_close(model.pos_embed, resample_abs_pos_embed(learned, (4, 4), (8, 8)))


def test_windows_stay_and_their_tables_too():
    model = make("timm Swin", equipped=False)
    tables = {name: p for name, p in model.named_parameters() if "bias_table" in name}
    irpe.resize(model, (64, 96))
    assert all(model.get_parameter(name) is table for name, table in tables.items())
    assert [block.window_size for block in model.layers[0].blocks] == [(4, 4), (4, 4)]


def test_decomposed_tables_that_were_converted_stay(tmp_path):
    sam = make("transformers SAM", equipped=False)
    irpe.equip(sam, "cross-contextual-k@clip3", builtin_bias="convert")
    before = run(sam, (32, 32))
    irpe.resize(sam, 64)
    out = run(sam, (64, 64))
    irpe.save_equipped(sam, tmp_path / "model")
    assert torch.equal(run(irpe.load_equipped(tmp_path / "model"), (64, 64)), out)
    assert torch.equal(run(irpe.resize(sam, 32), (32, 32)), before)


def test_a_model_in_a_model():
    class Segmenter(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone = make_vit(num_classes=0)

        def forward(self, x):
            return self.backbone.forward_features(x)

    model = irpe.equip(Segmenter(), "product-contextual-k")
    irpe.resize(model, (16, 40))
    assert run(model, (16, 40)).shape == (2, 11, 32)


def test_the_state_of_parameters_and_the_mode_stay():
    model = make_vit().double().train()
    model.pos_embed.requires_grad_(False)
    irpe.resize(model, 64)
    assert model.pos_embed.dtype == torch.float64
    assert not model.pos_embed.requires_grad
    assert model.training


@pytest.mark.parametrize("value", [0, -32, (32,), (32, 32, 3), "32", 32.0, (32, True), None])
def test_what_is_no_size(value):
    with pytest.raises(irpe.UserError, match="must be a whole number of pixels"):
        irpe.resize(make_vit(), value)


def test_sizes_that_would_do():
    model = make("timm ViT")
    state = snapshot(model)
    with pytest.raises(irpe.UserError, match=r"8 x 8 pixels do not divide 36; 32 x 40 .*would do"):
        irpe.resize(model, (36, 40))
    assert_same(model.state_dict(), state)
    with pytest.raises(irpe.UserError, match="is not a model of timm, transformers or torchvision"):
        irpe.resize(nn.Linear(2, 2), 32)
    told = irpe.equip(make_vit(), "product-contextual-k", grid=(4, 4))
    with pytest.raises(irpe.UserError, match=r"irpe.equip was told grid=\(4, 4\)"):
        irpe.resize(told, 64)


def test_a_failure_on_the_way_leaves_the_model(monkeypatch):
    model = make("timm BEiT")
    state, before = snapshot(model), run(model, (32, 32))
    kind = type(model.blocks[1].attn)

    def fail(self, size):
        if self is model.blocks[1].attn:
            raise RuntimeError("no memory\nat all")
        return own(self, size)

    own = kind.__mro__[1].set_window_size
    monkeypatch.setattr(kind.__mro__[1], "set_window_size", fail)
    with pytest.raises(irpe.UserError, match=r"64 x 64 pixels: no memory$"):
        irpe.resize(model, 64)
    assert_same(model.state_dict(), state)
    assert torch.equal(run(model, (32, 32)), before)


def test_a_size_that_fails_is_not_logged(caplog):
    model = make("transformers CLIP", equipped=False)
    with pytest.raises(irpe.UserError, match="would do"):
        irpe.resize(model, (40, 36))
    assert not caplog.records
