import threading

import pytest
import torch
from train.processes import kill_again_and_again, start, torchrun
from train.scenes import CONFIG, SHARED, frozen, make_scenes, task, train, trainer

from irpe.train.checkpoint import load_checkpoint
from irpe.train.detection import feature_cache as features
from irpe.train.detection.annotations.source import Target
from irpe.train.detection.feature_cache import FeatureMaps
from irpe.train.detection.task import find_boxes
from irpe.train.detection.views import BoxImages, Views
from irpe.train.engine import StoppedError, make_accelerator
from irpe.train.runs import load_run, read_config
from irpe.train.sampling import Draw


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_scenes(tmp_path_factory.mktemp("data") / "scenes")


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "PLACE", tmp_path / "cache")


def same(one, two):
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=0, rtol=0, msg=name)


@pytest.mark.parametrize("encoding", [CONFIG.encoding, "none"])
@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
def test_a_run_ends_with_a_model_and_a_table(data, tmp_path, is_frozen, encoding):
    config = (frozen(data) if is_frozen else CONFIG).replace(encoding=encoding)
    model = train(data, tmp_path / "run", config)
    state = load_checkpoint(tmp_path / "run" / "checkpoint.pt")
    assert [row["epoch"] for row in state["history"]] == [1, 2]
    assert {"AP", "AP50", "AP75", "APs", "APm", "APl", "train_loss"} <= set(state["history"][0])
    assert read_config(tmp_path / "run").classes == ("red", "blue")
    again = load_run(tmp_path / "run")
    same(model.state_dict(), again.state_dict())
    image = torch.randn(1, 3, 64, 96)
    with torch.no_grad():
        torch.testing.assert_close(again(image).logits, model.eval()(image).logits)


@pytest.mark.parametrize("is_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("stop", [1, 3])
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(data, tmp_path, is_frozen, stop):
    config = frozen(data) if is_frozen else CONFIG
    whole = train(data, tmp_path / "whole", config)
    stopped = threading.Event()
    runner = trainer(data, tmp_path / "run", config)
    steps, run_step = [], runner._run_step

    def counted(contents):
        steps.append(0)
        if len(steps) == stop:
            stopped.set()
        return run_step(contents)

    runner._run_step = counted
    with pytest.raises(StoppedError):
        runner.run(stopped)
    same(whole.state_dict(), train(data, tmp_path / "run", config).state_dict())


def test_learning_rates_and_decay(data):
    job = task(data)
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
    assert found[tables[0]] == (1e-3, 0)


def test_the_learning_rate_drops_for_the_last_epochs(data, tmp_path):
    train(data, tmp_path / "run", CONFIG.replace(epochs=4, last_epochs=3, limit=4))
    rates = [row["lr"] for row in load_checkpoint(tmp_path / "run/checkpoint.pt")["history"]]
    assert rates == pytest.approx([1e-3, 1e-4, 1e-4, 1e-4])


SCRIPT = """
import sys
from irpe.train.engine import make_accelerator
from train.scenes import SHARED, train
accelerator = make_accelerator()
assert accelerator.num_processes == 2
train(sys.argv[1], sys.argv[2], SHARED)
accelerator.end_training()
"""


def test_two_processes_in_parts_train_what_one_trains(data, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    # 4 images a step: 2 for each process, one at a time
    torchrun(2, tmp_path / "script.py", data, tmp_path / "two")
    train(data, tmp_path / "one", SHARED)
    one, two = (load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("one", "two"))
    assert one["epoch"] == two["epoch"] == 2
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, atol=2e-5, rtol=0, msg=name)
    for row_of_one, row_of_two in zip(one["history"], two["history"], strict=True):
        assert row_of_one["train_loss"] == pytest.approx(row_of_two["train_loss"], abs=1e-4)


def test_kept_features_are_those_of_the_images(data, tmp_path):
    job = task(data, frozen(data))
    backbone = job.build().model.backbone
    maps = features.keep_features(backbone, job.train, job_views(), 2, 3)
    pixels, target, _ = BoxImages(job.train, job_views(), 0)[Draw(1, 5, 5)]
    kept, kept_target, number = maps.items[5][1]
    with torch.no_grad():
        torch.testing.assert_close(kept, backbone.model(pixels[None])[-1][0])
    assert number == 5
    assert torch.equal(kept_target.labels, target.labels)
    ratio = torch.tensor([kept.shape[a] / pixels.shape[a] for a in (2, 1, 2, 1)])
    torch.testing.assert_close(kept_target.boxes, target.boxes * ratio)
    files = list((tmp_path / "cache").iterdir())
    again = features.keep_features(backbone, job.train, job_views(), 2, 3)
    assert torch.equal(again.items[5][1][0], kept)
    assert list((tmp_path / "cache").iterdir()) == files


def job_views():
    return Views((64,), 160, 0.5, False, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def test_draws_take_versions_by_seed_epoch_and_position(data):
    images = task(data, frozen(data)).images
    draws = [Draw(epoch, position, 5) for epoch in range(4) for position in range(4)]
    first = [images[draw] is images.items[5][0] for draw in draws]
    assert set(first) == {False, True}
    assert [images[draw] is images.items[5][0] for draw in draws] == first
    other = task(data, frozen(data).replace(seed=1)).images
    assert [other[draw] is other.items[5][0] for draw in draws] != first


def test_cut_feature_maps_keep_what_their_boxes_enclose(data):
    source = task(data).train
    features = torch.zeros(2, 7, 9)
    features[0, 2:5, 3:8] = 1
    features[1, 6, 0] = 1
    boxes = torch.tensor([[3.0, 2, 8, 5], [0, 6, 1, 7]])
    whole = features, Target(boxes, torch.tensor([0, 1])), 0
    maps = FeatureMaps(source, [[whole]], 3, is_cut=True)
    shapes = set()
    for position in range(60):
        part, target, _ = maps[Draw(0, position, 0)]
        shapes.add(tuple(part.shape[1:]))
        expected = {label: part[label].sum().item() for label in (0, 1) if part[label].any()}
        found = {
            int(label): ((x2 - x1) * (y2 - y1)).item()
            for (x1, y1, x2, y2), label in zip(target.boxes, target.labels, strict=True)
        }
        assert found == expected
        for (x1, y1, x2, y2), label in zip(target.boxes.int(), target.labels, strict=True):
            assert part[label, y1:y2, x1:x2].all()
        assert torch.equal(maps[Draw(0, position, 0)][0], part)
    assert {height for height, _ in shapes} == {4, 5, 6, 7}
    assert {width for _, width in shapes} == {5, 6, 7, 8, 9}


def test_damaged_features_are_named(data, tmp_path):
    task(data, frozen(data))
    for path in (tmp_path / "cache").iterdir():
        path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"safetensors is damaged: .*; remove it"):
        task(data, frozen(data))


def test_features_follow_the_data_and_the_weights(data, tmp_path):
    backbone = task(data, frozen(data)).build().model.backbone
    job = task(data, frozen(data))
    names = [features._key(backbone, job.train, job_views(), 2)]
    names.append(features._key(backbone, job.train.first(7), job_views(), 2))
    names.append(features._key(backbone, job.train, job_views(), 3))
    with torch.no_grad():
        next(backbone.parameters()).add_(1)
    names.append(features._key(backbone, job.train, job_views(), 2))
    assert len(set(names)) == 4


def test_boxes_are_found_in_every_image_once(data):
    job = task(data)
    model, accelerator = job.build(), make_accelerator()
    found = find_boxes(model, job.val_images, job.val.categories, accelerator)
    assert len(found) == 8 * 5
    assert {box["image_id"] for box in found} == set(range(8))
    assert {box["category_id"] for box in found} <= {1, 2}


def test_a_missing_folder(tmp_path):
    with pytest.raises(ValueError, match="data is missing"):
        task("embedded")
    with pytest.raises(FileNotFoundError, match="is no folder"):
        task(tmp_path / "nowhere")


def test_views_need_a_frozen_backbone_with_weights():
    with pytest.raises(ValueError, match="set backbone_lr to 0"):
        CONFIG.replace(views=2)
    with pytest.raises(ValueError, match="set backbone_weights to"):
        CONFIG.replace(views=2, backbone_lr=0.0)


LONG = """
import sys
from train.processes import kill_again_and_again, start, torchrun
from train.scenes import CONFIG, train
train(sys.argv[1], sys.argv[2], CONFIG.replace(epochs=8))
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_damages_nothing(data, tmp_path):
    path = tmp_path / "run/checkpoint.pt"
    kill_again_and_again(lambda: start(LONG, data, tmp_path / "run"), path, 4)
    assert start(LONG, data, tmp_path / "run").wait() == 0
    assert start(LONG, data, tmp_path / "whole").wait() == 0
    one, two = (load_checkpoint(tmp_path / n / "checkpoint.pt") for n in ("run", "whole"))
    same(one["model"], two["model"])
