"""Detection in the training loop: the same run however it is stopped, cached or split."""

import shutil

import pytest
import torch
from train.boxed import make_voc, voc_object, voc_text
from train.scenes import CONFIG, frozen, make_scenes, task, train

from irpe.core.learning_rates import TABLE_LR
from irpe.train.evaluation import evaluate
from irpe.train.run import Run, load_run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_scenes(tmp_path_factory.mktemp("data") / "scenes")


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRPE_FEATURE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def same(one, two):
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=0, rtol=0, msg=name)


@pytest.fixture(scope="module", params=["trained", "frozen"])
def whole(request, data, tmp_path_factory):
    """A configuration, and an uninterrupted run of it."""
    config = (frozen(data) if request.param == "frozen" else CONFIG).replace(epochs=1)
    directory = tmp_path_factory.mktemp("whole") / "run"
    return config, directory, train(data, directory, config)


def check_run(directory, found):
    state = Run(directory).checkpoint()
    assert repr(state["history"]) == repr(found.history)  # NaN is not equal to itself
    assert [row["epoch"] for row in found.history] == list(range(1, len(found.history) + 1))
    assert {"AP", "AP50", "AP75", "APs", "APm", "APl", "train_loss"} <= set(found.history[0])
    assert repr(found.score.row())[1:-1] in repr(found.history[-1])
    assert Run(directory).config.classes == ("red", "blue")
    again = load_run(directory)
    same(found.model.state_dict(), again.state_dict())
    return again


def test_a_run_ends_with_a_model_that_takes_images_and_a_table(whole):
    config, directory, found = whole
    again = check_run(directory, found)
    image = torch.randn(1, 3, 64, 96)
    model = found.model.eval()
    with torch.no_grad():
        if config.cached_versions:
            features = model.model.backbone.feature_map(image)
            expected = model(features).logits
        else:
            expected = model(image).logits
        torch.testing.assert_close(again(image).logits, expected)


def test_learning_rates_and_decay(data):
    job = task(data)
    job.open("train", None)
    model = job.build()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = job.groups(model)
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert set(found) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert found["model.backbone.model.layer4.0.conv1.weight"] == (1e-4, 0.05)
    assert found["model.encoder.layers.0.mlp.fc1.weight"] == (1e-3, 0.05)
    assert found["model.encoder.layers.0.mlp.fc1.bias"] == (1e-3, 0.05)
    assert not any("backbone" in name and "layer1" in name for name in found)
    tables = [name for name in found if ".rpe." in name]
    assert len(tables) == 1
    assert found[tables[0]] == (1e-3 * TABLE_LR, 0)


def test_boxes_are_detected_in_every_image_once(data):
    job = task(data)
    job.open("train", None)
    (evaluation,) = evaluate((job, job.build()))
    found = evaluation.score.files["detections.json"]
    assert len(found) == 8 * 5
    assert {box["image_id"] for box in found} == set(range(8))
    assert {box["category_id"] for box in found} <= {1, 2}


def test_an_image_that_cannot_be_read_is_counted_and_its_boxes_do_not_count(data, tmp_path):
    damaged = shutil.copytree(data, tmp_path / "damaged")
    (damaged / "train/3.png").write_bytes(b"nothing")
    job = task(damaged, CONFIG.replace(max_broken=0.2))
    job.open("train", None)
    pair = job, job.build()
    (found,) = evaluate(pair)
    assert (found.score.num_images, found.score.num_broken) == (7, 1)
    assert 3 not in {box["image_id"] for box in found.score.files["detections.json"]}
    job.config = job.config.replace(max_broken=0.1)
    with pytest.raises(ValueError, match=r"1 of 8 images cannot be read.*3\.png"):
        list(evaluate(pair))


def test_images_of_voc_without_lists_are_held_out(tmp_path):
    scene = [voc_object(name, (4, 4, 20, 20)) for name in ("red", "blue")]
    texts = {f"{n:02}": voc_text(*(scene if n == 7 else scene[:1])) for n in range(10)}
    shutil.rmtree(make_voc(tmp_path, texts) / "ImageSets")
    with pytest.raises(FileNotFoundError, match=r"--holdout 0\.2"):
        task(tmp_path).open("train", None)
    job = task(tmp_path, CONFIG.replace(val_split="val", holdout=0.3))
    opened = (job.open("train", None).source, job.open("val").source)
    parts = [[s.filename(i)[-6:-4] for i in range(len(s))] for s in opened]
    assert [len(part) for part in parts] == [7, 3]
    assert sorted(parts[0] + parts[1]) == sorted(texts)
    assert job.config.classes == ("blue", "red")  # of all images, wherever the blue one is
    again = task(tmp_path, CONFIG.replace(val_split="val", holdout=0.3, classes=job.config.classes))
    assert [again.open("val").source.filename(i)[-6:-4] for i in range(3)] == parts[1]
    make_voc(tmp_path, texts)
    with pytest.raises(ValueError, match=r"--holdout is for .* leave it out"):
        task(tmp_path, CONFIG.replace(val_split="val", holdout=0.3)).open("train", None)


def test_cached_features_need_a_frozen_backbone_with_weights():
    with pytest.raises(ValueError, match="set backbone_lr to 0"):
        CONFIG.replace(cached_versions=2)
    with pytest.raises(ValueError, match="set backbone_weights to"):
        CONFIG.replace(cached_versions=2, backbone_lr=0.0)
