"""The segmenter: any size, any head, any backbone that gives feature maps, and its weights."""

import pytest
import timm
import torch
from torch.nn import functional
from train.streets import CLASSES, CONFIG

import irpe
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.task import build_model
from irpe.tasks.segment.task import SegmentationTask, build_segmenter

READY = CONFIG.replace(classes=CLASSES)


def randomize(model):
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("head", ["linear", "upsampling"])
@pytest.mark.parametrize("absolute", ["keep", "none", "sinusoid"])
def test_every_size_gets_a_score_for_each_pixel(head, absolute):
    model = randomize(build_segmenter(READY.replace(head=head, absolute=absolute)))
    for size in ((16, 32), (17, 30), (40, 24), (8, 8)):
        with torch.no_grad():
            scores = model(torch.randn(2, 3, *size))
        assert scores.shape == (2, 3, *size)


def test_a_linear_head_scores_the_tokens_of_each_patch():
    model = randomize(build_segmenter(READY))
    images = torch.randn(2, 3, 16, 40)
    tokens = model.backbone.forward_features(images)[:, 1:]  # after the class token
    scores = functional.linear(tokens, model.head.weight[..., 0, 0], model.head.bias)
    maps = scores.transpose(1, 2).reshape(2, 3, 2, 5)
    expected = functional.interpolate(maps, scale_factor=8, mode="bilinear")
    torch.testing.assert_close(model(images), expected)


def test_padding_stands_to_the_right_and_below():
    model = randomize(build_segmenter(READY))
    images = torch.randn(1, 3, 13, 27)
    padded = functional.pad(images, (0, 5, 0, 3))
    torch.testing.assert_close(model(images), model(padded)[..., :13, :27])


def test_without_position_a_shifted_image_gets_shifted_scores():
    """The head tells no position: whole patches moved around are scored as before."""
    model = randomize(build_segmenter(READY.replace(encoding="none", absolute="none")))
    images = torch.randn(1, 3, 16, 32)
    features = [
        model.backbone.forward_intermediates(x, indices=1, norm=True, intermediates_only=True)[0]
        for x in (images, images.roll(8, -1))
    ]
    torch.testing.assert_close(features[1], features[0].roll(1, -1))


def test_the_relative_encoding_meets_the_grid_of_each_image():
    """Images of 2 x 6 and 3 x 4 patches have equally many tokens, and different offsets."""
    model = randomize(build_segmenter(READY))
    images = torch.randn(2, 3, 16, 48), torch.randn(2, 3, 24, 32)
    expected = [model(x) for x in images]
    vit = timm.create_model(
        READY.model, num_classes=0, global_pool="", img_size=(24, 32), **READY.model_args
    )
    irpe.equip(vit, READY.encoding, absolute="none")
    vit.load_state_dict(model.backbone.state_dict())
    tokens = vit.eval().forward_features(images[1])[:, 1:]
    scores = functional.linear(tokens, model.head.weight[..., 0, 0], model.head.bias)
    maps = scores.transpose(1, 2).reshape(2, 3, 3, 4)
    torch.testing.assert_close(
        expected[1], functional.interpolate(maps, scale_factor=8, mode="bilinear")
    )
    torch.testing.assert_close(model(images[0]), expected[0])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("swin_tiny_patch4_window7_224", {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2]}),
        ("eva02_tiny_patch14_224", {**CONFIG.model_args, "depth": 1}),
    ],
)
def test_other_backbones(name, arguments):
    config = READY.replace(model=name, model_args=arguments, encoding="product-contextual-k")
    model = build_segmenter(config.replace(absolute="keep"))
    for size in ((16, 32), (24, 16)):
        scores = model(torch.randn(1, 3, *size))
        assert scores.shape == (1, 3, *size)
    scores.square().mean().backward()
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert not unused  # which several processes could not train


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"crop_height": 20}, "crop_height = 20 is not a multiple of 8, .* choose 16 or 24"),
        ({"model": "samvit_base_patch16", "model_args": {}}, "does not take images of any size"),
        ({"model": "resnet18", "model_args": {}}, "'resnet18' does not take images of any size"),
        ({"model": "nothing"}, "nothing"),
    ],
)
def test_models_that_cannot_be(changes, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        build_segmenter(READY.replace(**changes))


def test_a_run_starts_from_a_classifier_of_another_size(tmp_path):
    config = ClassifierConfig(
        model=READY.model, model_args=READY.model_args, image_size=24, encoding=READY.encoding
    )
    classifier = randomize(build_model(config, 7))
    torch.save(classifier.state_dict(), tmp_path / "classifier.pth")
    initial = READY.replace(initial=str(tmp_path / "classifier.pth"), absolute="keep")
    model = build_segmenter(initial)
    own = classifier.state_dict()
    for name, value in model.backbone.state_dict().items():
        if name == "pos_embed":
            assert value.shape == (1, 1 + 2 * 4, 16)
            torch.testing.assert_close(value[:, 0], own[name][:, 0])
        else:
            torch.testing.assert_close(value, own[name], msg=name)


def test_a_run_starts_from_another_segmenter(tmp_path):
    other = randomize(build_segmenter(READY))
    torch.save(other.state_dict(), tmp_path / "other.pth")
    same = READY.replace(initial=str(tmp_path / "other.pth"))
    torch.testing.assert_close(build_segmenter(same).state_dict(), other.state_dict())
    model = build_segmenter(same.replace(classes=("one", "two")))
    assert model.head.weight.shape[0] == 2
    torch.testing.assert_close(model.backbone.state_dict(), other.backbone.state_dict())
    with pytest.raises(ValueError, match="does not fit the model"):
        build_segmenter(same.replace(model_args={**READY.model_args, "depth": 3}))


def test_the_model_of_a_run_is_built_without_its_initial_weights():
    config = READY.replace(initial="nowhere.pth")
    model = build_segmenter(config, is_filled=False)
    resumed = SegmentationTask(config, model.state_dict()).build()
    assert resumed.state_dict().keys() == model.state_dict().keys()
