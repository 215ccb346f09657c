"""Segmentation in the training loop: the same run however it is stopped or split."""

import pytest
import torch
from PIL import Image
from train.streets import CLASSES, CONFIG, VOID, make_streets, task, train

from irpe.core.learning_rates import ABSOLUTE_LR, TABLE_LR
from irpe.errors import UserError
from irpe.tasks.segment.scores import count_pixels, pixel_loss
from irpe.train.evaluation import evaluate
from irpe.train.processes import Sample, make_accelerator
from irpe.train.run import Run, load_run


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_streets(tmp_path_factory.mktemp("data") / "streets")


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """An uninterrupted run."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    return directory, train(data, directory)


def same(one, two):
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=0, rtol=0, msg=name)


def test_a_run_ends_with_a_model_and_a_table(whole):
    directory, found = whole
    assert {"mIoU", "pixel_accuracy", "class_accuracy", "effect"} <= set(found.history[-1])
    assert found.history[-1]["mIoU"] == found.score.value
    assert found.score.num_images == 8
    config = Run(directory).config
    assert config.classes == ("0", "1", "2")
    again = load_run(directory)
    same(found.model.state_dict(), again.state_dict())
    image = torch.randn(1, 3, 24, 40)
    torch.testing.assert_close(again(image), found.model.eval()(image))


def test_a_run_learns(data, tmp_path):
    config = CONFIG.replace(epochs=10, lr=5e-3, eval_every=10, min_resize=1.0, max_resize=1.0)
    found = train(data, tmp_path / "run", config)
    assert found.score.value > 60
    assert found.history[-1]["train_loss"] < 0.7 * found.history[0]["train_loss"]


def test_the_loss_of_a_step_is_the_mean_over_its_pixels_however_it_is_split(data):
    """Micro-batches differ in how many of their pixels have a class."""
    job, accelerator = task(data), make_accelerator()
    torch.manual_seed(0)
    images = job.open("train", None)
    model = job.build()
    items = [images[Sample(0, position, position)] for position in range(4)]
    items[0][1][:12] = 255  # almost nothing is scored in the first one
    (expected,) = job.losses(model, [images.collate(items)], accelerator)
    scores = model(torch.stack([item[0] for item in items]))
    labels = torch.stack([item[1] for item in items]).long()
    mean = torch.nn.functional.cross_entropy(scores, labels, ignore_index=255)
    torch.testing.assert_close(expected, mean)
    losses = list(job.losses(model, [images.collate([item]) for item in items], accelerator))
    torch.testing.assert_close(torch.stack(losses).mean(), expected)


def test_a_step_without_any_class_has_no_loss():
    labels = torch.full((1, 2, 2), 255, dtype=torch.uint8)
    assert count_pixels([labels[0]]) == 0
    assert pixel_loss(torch.randn(1, 3, 2, 2), labels, 1.0) == 0


def test_learning_rates_and_decay(data):
    job = task(data, CONFIG.replace(absolute="keep"))
    job.open("train", None)
    model = job.build()
    names = {id(p): name for name, p in model.named_parameters()}
    groups = job.groups(model)
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in groups for p in g["params"]}
    assert set(found) == set(names.values())
    assert found["backbone.blocks.0.mlp.fc1.weight"] == (1e-3, 0.05)
    assert found["backbone.blocks.0.mlp.fc1.bias"] == (1e-3, 0)
    assert found["backbone.pos_embed"] == (pytest.approx(1e-3 * ABSOLUTE_LR), 0)
    assert found["head.weight"] == (1e-3, 0.05)
    tables = [name for name in found if ".rpe." in name]
    assert len(tables) == 6
    assert {found[name] for name in tables} == {(1e-3 * TABLE_LR, 0)}


def test_classes_with_names_and_fewer_images(data, tmp_path):
    (tmp_path / "names.txt").write_text("\n".join(CLASSES))
    job = task(data, CONFIG.replace(class_names=str(tmp_path / "names.txt"), limit=3))
    assert (len(job.open("train", None)), len(job.open("val"))) == (3, 3)
    assert job.config.classes == CLASSES


def test_images_of_voc_without_lists_are_held_out(tmp_path, data):
    for number in range(6):
        for folder, ending in (("JPEGImages", "jpg"), ("SegmentationClass", "png")):
            path = tmp_path / folder / f"{number}.{ending}"
            path.parent.mkdir(exist_ok=True)
            if ending == "jpg" or number:  # one image has no label map
                Image.new("L", (32, 16), 3 * (ending == "png")).save(path)
    config = CONFIG.replace(ignore_label=255, holdout=0.4)
    with pytest.raises(FileNotFoundError, match=r"--holdout 0\.2"):
        task(tmp_path, config.replace(holdout=0.0)).open("train", None)
    job = task(tmp_path, config)
    opened = (job.open("train", None).source, job.open("val").source)
    parts = [[s.filename(i)[-5] for i in range(len(s))] for s in opened]
    assert [len(part) for part in parts] == [3, 2]
    assert sorted(parts[0] + parts[1]) == ["1", "2", "3", "4", "5"]
    assert (opened[1].read(0)[1] == 3).all()
    lists = tmp_path / "ImageSets/Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("1\n2\n")
    for folder in (tmp_path, data):
        with pytest.raises(ValueError, match="--holdout is for"):
            task(folder, config).open("train", None)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"head": "pyramid"}, "'pyramid'"),
        ({"min_resize": 2.0, "max_resize": 1.0}, "max_resize = 1.0"),
        ({"ignore_label": 256}, "ignore_label = 256"),
        ({"stride": 17}, "stride = 17"),
        ({"poly_power": 1.0, "low_lr_epochs": 1}, "low_lr_epochs = 1 and poly_power = 1.0"),
        ({"crop_width": 0}, "crop_width = 0"),
    ],
)
def test_configurations_that_cannot_be(changes, said):
    with pytest.raises(UserError) as error:
        CONFIG.replace(**changes)
    assert said in str(error.value)


def test_sliding_windows_are_another_score_of_the_same_model(data, whole):
    job = task(data, CONFIG.replace(sliding=True, classes=("0", "1", "2"), ignore_label=VOID))
    (windows,) = evaluate((job, load_run(whole[0])))
    assert windows.score.num_images == 8
    assert windows.score.values != whole[1].score.values
