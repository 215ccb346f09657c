"""transformers' Segformer and UperNet as segmenters: sizes, zero tables, runs, weights, errors."""

import pytest
import timm
import torch
from torch.nn import functional
from train import streets
from train.streets import CLASSES, CONFIG, make_streets, task, train
from transformers import (
    AutoConfig,
    SegformerConfig,
    SegformerForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    UperNetForSemanticSegmentation,
)
from transformers.models.beit.modeling_beit import BeitRelativePositionBias

import irpe
from irpe.core.learning_rates import TABLE_LR
from irpe.tasks.segment.config import SegmenterConfig
from irpe.tasks.segment.crops import Normalize
from irpe.tasks.segment.task import build_segmenter
from irpe.tasks.segment.transformers_segmenter import BACKBONES, _own_config
from irpe.train.run import load_run

SEGFORMER = streets.SEGFORMER.model_args
STAGES = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
TOKENS = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 32,
}
WIDE = {**TOKENS, "intermediate_size": 32}
ARGUMENTS = {
    "beit": {**WIDE, "use_absolute_position_embeddings": True, "use_relative_position_bias": True},
    "dinov2": TOKENS,
    "dinov2_with_registers": TOKENS,
    "dinov3_vit": WIDE,
    "pixio": TOKENS,
    "swin": STAGES,
    "swinv2": STAGES,
    "vitdet": {**TOKENS, "pretrain_image_size": 32},
    "timm_backbone": {"backbone": "pvt_v2_b0"},
}


def upernet(kind, **changes):
    backbone = {"model_type": kind, **ARGUMENTS[kind], **changes}
    return CONFIG.replace(
        model="upernet",
        model_args={"backbone_config": backbone, "hidden_size": 8},
        classes=CLASSES,
        absolute="keep",
    )


CONFIGS = {
    "segformer": streets.SEGFORMER.replace(classes=CLASSES),
    "swin": upernet("swin"),
    "dinov2": upernet("dinov2"),
}


def randomize(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def score(model, images):
    with torch.no_grad():
        return model(images)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_streets(tmp_path_factory.mktemp("data") / "streets")


@pytest.mark.parametrize("name", ["segformer", *BACKBONES])
def test_every_network_takes_every_size_and_an_encoding(name):
    config = CONFIGS["segformer"] if name == "segformer" else upernet(name)
    torch.manual_seed(0)
    plain = build_segmenter(config.replace(encoding="none")).eval()
    model = build_segmenter(config)
    missing = model.load_state_dict(plain.state_dict(), strict=False).missing_keys
    assert missing
    assert all(".rpe." in key for key in missing)
    for size in ((16, 32), (17, 40)):
        images = torch.randn(2, 3, *size)
        expected = score(plain, images)
        assert expected.shape == (2, 3, *size)
        torch.testing.assert_close(score(model.eval(), images), expected, atol=1e-5, rtol=1e-5)
    model.train()(images).square().mean().backward()
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert [name for name, p in learned.items() if p.grad is None] == []  # DDP could not train it
    assert any(p.grad.abs().max() > 0 for name, p in learned.items() if ".rpe." in name)


COARSE = CONFIGS["segformer"].replace(model_args={**SEGFORMER, "sr_ratios": [8, 4, 2, 2]})


@pytest.mark.parametrize(
    ("config", "stride"),
    [(CONFIGS["segformer"], 32), (COARSE, 64), (CONFIGS["swin"], 8), (CONFIGS["dinov2"], 8)],
)
def test_scores_are_those_of_transformers_on_images_that_are_padded(config, stride):
    model = randomize(build_segmenter(config))
    assert model.stride == stride
    images = torch.randn(2, 3, 33, 70)
    padded = functional.pad(images, (0, -70 % stride, 0, -33 % stride))
    with torch.no_grad():
        logits = model.model(pixel_values=padded).logits
    expected = functional.interpolate(logits, size=padded.shape[-2:], mode="bilinear")
    torch.testing.assert_close(score(model, images), expected[..., :33, :70])


def test_the_absolute_encoding_is_resampled_or_removed():
    images = torch.randn(1, 3, 40, 64)
    for absolute, tells_position in (("keep", True), ("none", False)):
        config = upernet("dinov2").replace(encoding="none", absolute=absolute)
        backbone = randomize(build_segmenter(config)).model.backbone
        with torch.no_grad():
            maps = [backbone(x).feature_maps[-1] for x in (images, images.roll(8, -1))]
        assert maps[0].shape[-2:] == (5, 8)
        difference = (maps[1] - maps[0].roll(1, -1)).abs().max()
        assert (difference > 1e-3) == tells_position


@pytest.mark.parametrize("name", ["segformer", "dinov2"])
def test_a_run_is_saved_and_loaded(data, tmp_path, name):
    config = CONFIGS[name].replace(classes=(), drop_path=0.1, epochs=1)
    whole = train(data, tmp_path / "whole", config)
    again = load_run(tmp_path / "whole")
    for key, value in whole.model.state_dict().items():
        torch.testing.assert_close(again.state_dict()[key], value, atol=0, rtol=0, msg=key)
    image = torch.randn(1, 3, 24, 40)
    torch.testing.assert_close(score(again, image), score(whole.model.eval(), image))
    assert any(key.endswith("running_mean") for key in again.state_dict())
    again.model.save_pretrained(tmp_path / "pretrained")
    of_transformers = irpe.load_equipped(tmp_path / "pretrained")
    for key, value in again.model.state_dict().items():
        torch.testing.assert_close(of_transformers.state_dict()[key], value, msg=key)


def test_learning_rates_and_decay(data):
    job = task(data, upernet("dinov2").replace(classes=(), absolute_lr=3.0))
    job.open("train", None)
    model = job.build()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = job.groups(model)
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    embeddings = "model.backbone.embeddings"
    assert f"{embeddings}.mask_token" not in found  # it does nothing
    assert found[f"{embeddings}.position_embeddings"] == (pytest.approx(3e-3), 0)
    assert found[f"{embeddings}.cls_token"] == (1e-3, 0)
    assert found["model.decode_head.classifier.weight"] == (1e-3, 0.05)
    tables = {found[name] for name in found if ".rpe." in name}
    assert tables == {(1e-3 * TABLE_LR, 0)}


def test_what_a_run_is_in_words():
    words = {name: CONFIGS[name].title for name in ("segformer", "dinov2")}
    assert words["segformer"].startswith("segformer hidden_sizes=[8, 8, 16, 16] depths=")
    assert words["dinov2"].startswith("upernet hidden_size=8 over dinov2 hidden_size=16")


def test_no_network_is_left_with_tensors_that_hold_nothing():
    """BEiT caches the index of its bias for all models: one without values would be used later."""
    build_segmenter(upernet("beit"))
    index = BeitRelativePositionBias.generate_relative_position_index((2, 4))
    assert index.device.type == "cpu"


@pytest.mark.parametrize(
    ("depth", "indices"), [(12, [3, 6, 9, 12]), (4, [1, 2, 3, 4]), (2, [1, 2]), (7, [2, 4, 5, 7])]
)
def test_feature_maps_are_spread_over_the_stages(depth, indices):
    assert (
        _own_config(upernet("dinov2", num_hidden_layers=depth)).backbone_config.out_indices
        == indices
    )


@pytest.mark.parametrize(
    ("config", "mean"),
    [
        (CONFIGS["segformer"], 0.485),
        (CONFIGS["swin"], 0.485),
        (upernet("beit"), 0.5),
        (upernet("timm_backbone", backbone="vit_base_patch16_siglip_224"), 0.5),
    ],
)
def test_images_have_the_colours_of_the_network(config, mean):
    assert Normalize(config).colours["mean"][0] == mean


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"head": "linear"},
            "head 'linear' is for models of timm: segformer has a head of its own",
        ),
        ({"initial": "pretrained"}, "for segformer name a folder that save_pretrained wrote"),
        ({"model": "upernet"}, 'upernet needs a backbone .* {"model_type": "swin"}'),
        (
            {
                "model": "upernet",
                "model_args": {"backbone_config": {"model_type": "timm_backbone"}},
            },
            '"backbone": "pvt_v2_b0"',
        ),
    ],
)
def test_configurations_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        CONFIGS["segformer"].replace(**changes)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            CONFIGS["segformer"].replace(model_args={"patch_size": 12}),
            "'patch_size' is not an argument .*Segformer; did you mean 'patch_sizes'. {} takes all",
        ),
        (CONFIGS["segformer"].replace(model_args={"depths": "many"}), "model_args .*depths"),
        (CONFIGS["segformer"].replace(absolute="sinusoid"), "has no absolute encoding to replace"),
        (upernet("swin", depth=[1]), "'depth' is not an argument of transformers' swin"),
        (
            upernet("swin", use_absolute_embeddings=True),
            "does not score images of any size: .* the backbones of upernet are beit, dinov2",
        ),
        (
            upernet("timm_backbone", backbone="vit_tiny_patch16_224"),
            "does not score images of any size: Input height .* match model",
        ),
        (upernet("timm_backbone", backbone="no_such"), "no_such"),
        (upernet("timm_backbone").replace(drop_path=0.1), "has no stochastic depth to set"),
    ],
)
def test_networks_that_cannot_be(config, message):
    with pytest.raises(ValueError, match=message):
        build_segmenter(config)


def test_backbones_that_cannot_be():
    ARGUMENTS["resnet"] = {}
    with pytest.raises(ValueError, match="model_type 'resnet' is not one of beit, dinov2"):
        build_segmenter(upernet("resnet"))


def test_upernet_needs_two_images_to_normalize_over():
    config = upernet("swin")
    config.check_forward(2)
    with pytest.raises(ValueError, match=r"1 image per forward pass .* choose 2 or more"):
        config.check_forward(1)


def test_a_run_starts_from_another_segmenter(tmp_path):
    config = CONFIGS["segformer"]
    other = randomize(build_segmenter(config))
    torch.save(other.state_dict(), tmp_path / "other.pth")
    same = config.replace(initial=str(tmp_path / "other.pth"))
    torch.testing.assert_close(build_segmenter(same).state_dict(), other.state_dict())
    model = build_segmenter(same.replace(classes=("one", "two")))
    assert model.model.decode_head.classifier.out_channels == 2
    fitting = {k: v for k, v in other.state_dict().items() if "classifier" not in k}
    for key, value in fitting.items():
        torch.testing.assert_close(model.state_dict()[key], value, msg=key)
    wider = {**SEGFORMER, "decoder_hidden_size": 8}
    with pytest.raises(ValueError, match="does not fit the model"):
        build_segmenter(same.replace(model_args=wider))


def test_weights_that_transformers_published(tmp_path):
    classifier = randomize(SegformerForImageClassification(SegformerConfig(**SEGFORMER)))
    classifier.save_pretrained(tmp_path / "classifier")
    config = CONFIGS["segformer"].replace(initial=str(tmp_path / "classifier"))
    model = build_segmenter(config)
    for key, value in classifier.segformer.state_dict().items():
        torch.testing.assert_close(model.model.segformer.state_dict()[key], value, msg=key)
    deeper = {**SEGFORMER, "depths": [2, 1, 1, 1]}
    with pytest.raises(ValueError, match=r"it was made with {'depths': \[1, 1, 1, 1\]}, set"):
        build_segmenter(config.replace(model_args=deeper))
    SegformerForImageClassification(SegformerConfig(**deeper)).save_pretrained(tmp_path / "deeper")
    with pytest.raises(ValueError, match=r"it was made with {'depths': \[2, 1, 1, 1\]}, set"):
        build_segmenter(config.replace(initial=str(tmp_path / "deeper")))
    model.model.save_pretrained(tmp_path / "equipped")
    with pytest.raises(ValueError, match="saved by an equipped model: pass the folder of its run"):
        build_segmenter(config.replace(initial=str(tmp_path / "equipped")))
    with pytest.raises(ValueError, match="holds a segformer, not a swin or upernet"):
        build_segmenter(upernet("swin").replace(initial=config.initial))


def test_weights_of_a_backbone_and_of_a_whole_upernet(tmp_path):
    classifier = randomize(SwinForImageClassification(SwinConfig(**STAGES)))
    classifier.save_pretrained(tmp_path / "swin")
    config = upernet("swin").replace(initial=str(tmp_path / "swin"))
    model = build_segmenter(config)
    own = model.model.backbone.swin.state_dict()
    for key, value in classifier.swin.state_dict().items():
        if "layernorm" not in key.split(".")[0]:
            torch.testing.assert_close(own[key], value, msg=key)
    whole = randomize(build_segmenter(upernet("swin").replace(encoding="none"))).model
    whole.save_pretrained(tmp_path / "upernet")
    again = config.replace(initial=str(tmp_path / "upernet"), classes=("one", "two"))
    model = build_segmenter(again).model
    assert model.decode_head.classifier.out_channels == 2
    for key, value in whole.state_dict().items():
        if "classifier" not in key:
            torch.testing.assert_close(model.state_dict()[key], value, msg=key)
    assert isinstance(model, UperNetForSemanticSegmentation)


def test_weights_of_timm(monkeypatch):
    asked = []
    create = timm.create_model

    def create_filled(name, pretrained=False, **arguments):
        model = create(name, **arguments)
        if pretrained:
            asked.append(name)
            torch.nn.init.constant_(next(model.parameters()), 0.25)
        return model

    monkeypatch.setattr(timm, "create_model", create_filled)
    config = upernet("timm_backbone")
    model = build_segmenter(config.replace(initial="pretrained"))
    assert asked == ["pvt_v2_b0"]
    assert (next(model.model.backbone.parameters()) == 0.25).all()


def test_weights_that_cannot_be_had(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(AutoConfig, "from_pretrained", refuse)
    config = CONFIGS["segformer"].replace(initial="runs/nowhere")
    with pytest.raises(ValueError, match=r"neither a run, a file, nor .* the hub: no network"):
        build_segmenter(config)
    with pytest.raises(FileNotFoundError, match="is not a finished run"):
        build_segmenter(config.replace(initial=str(tmp_path)))
    assert isinstance(config, SegmenterConfig)
    build_segmenter(config, is_filled=False)  # a run that is resumed has its own
