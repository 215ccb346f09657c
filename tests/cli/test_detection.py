"""`irpe train` and `irpe eval` of a detector, as a user calls them."""

import json
import shutil

import pytest
import torch
from cli.terminal import irpe
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from train.scenes import CONFIG, frozen, make_scenes

from irpe.train.run import read_metrics

pytest.importorskip("transformers", reason="needs the extra 'transformers'")

LITTLE = [
    "--set", "backbone=resnet10t", "--set", "backbone_weights=none", "--model-args",
    json.dumps(CONFIG.model_args), "--set", "val_split=train", "--epochs", "1",
    "--set", "low_lr_epochs=0",
    "--batch-size", "4", "--set", "short_side=96", "--set", "min_short_side=64", "--workers", "0",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("detect")
    make_scenes(directory / "scenes")
    done = irpe("train", "detr_r50_k", "--data", "scenes", *LITTLE, cwd=directory)
    assert done.returncode == 0, done.stderr
    assert "AP50" in done.stderr
    assert "model: runs/detr_r50_k/model" in done.stdout
    return directory


def test_scores_are_those_of_pycocotools(run):
    done = irpe("eval", "runs/detr_r50_k", "--json", cwd=run)
    values = json.loads(done.stdout)
    assert values == json.loads((run / "runs/detr_r50_k/eval/scores.json").read_text())
    assert values["num_images"] == 8
    truth = COCO(str(run / "scenes/annotations/instances_train.json"))
    found = truth.loadRes(str(run / "runs/detr_r50_k/eval/detections.json"))
    evaluation = COCOeval(truth, found, "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    ours = [values[name] for name in ("AP", "AP50", "AP75", "APs", "APm", "APl")]
    expected = evaluation.stats[:6].tolist()
    assert [-1 if value is None else value for value in ours] == expected


def test_the_line_for_people(run):
    done = irpe("eval", "runs/detr_r50_k", cwd=run)
    scores, by_class, where = done.stdout.splitlines()
    assert by_class.startswith("AP: ")
    assert scores.startswith("AP 0.")
    assert "AP medium" in scores
    assert where == f"8 images: {run / 'scenes'}, train; saved in runs/detr_r50_k/eval"
    assert len(scores) <= 80


def test_pictures(run, tmp_path):
    done = irpe("eval", "runs/detr_r50_k", "--draw", "3", "-o", str(tmp_path / "here"), cwd=run)
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in (tmp_path / "here").iterdir())
    names = [
        "0000-0.png",
        "0001-1.png",
        "0002-2.png",
        "contact-sheet.png",
        "detections.json",
        "scores.json",
    ]
    assert files == names
    with Image.open(tmp_path / "here" / "contact-sheet.png") as sheet:
        assert sheet.size[0] > 500


def test_the_threshold_decides_which_boxes_are_drawn(run, tmp_path):
    pictures = []
    for threshold in ("0", "1"):
        place = tmp_path / threshold
        options = ["--draw", "1", "--threshold", threshold, "-o", str(place)]
        assert irpe("eval", "runs/detr_r50_k", *options, cwd=run).returncode == 0
        pictures.append((place / "0000-0.png").read_bytes())
    assert pictures[0] != pictures[1]


def test_the_model_of_a_run_is_evaluated_like_the_run(run, tmp_path):
    place = str(tmp_path / "model")
    one = json.loads(irpe("eval", "runs/detr_r50_k", "--json", cwd=run).stdout)
    done = irpe("eval", "runs/detr_r50_k/model", "-o", place, "--json", cwd=run)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == one


def test_a_model_somewhere_else_needs_data(run, tmp_path):
    shutil.copytree(run / "runs/detr_r50_k/model", tmp_path / "copy")
    done = irpe("eval", "copy", cwd=tmp_path)
    assert "--data is missing" in done.stderr
    make_scenes(tmp_path / "few", count=2)  # which are evaluated at 800 pixels
    done = irpe("eval", "copy", "--data", "few", "--split", "train", "--json", cwd=tmp_path)
    assert json.loads(done.stdout)["num_images"] == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "detr_r50"], "data is missing"),
        (["train", "detr_r50", "--data", "nowhere"], "'nowhere' is not a folder"),
        (
            ["train", "detr_r50", "--set", "mixup=0.8"],
            "setting 'mixup' is not one of",
        ),
        (
            ["train", "laptop", "--set", "limit=3"],
            "setting 'limit' is not one of",
        ),
        (["train", "detr_r50", "--data", "scenes"], "no files for the split 'val'"),
        (["ablate", "--recipe", "detr_small"], "recipe 'detr_small' is not one of"),
        (["eval", "runs/detr_r50_k", "--split", "test"], "test"),
        (["eval", "runs/detr_r50_k", "--draw", "-1"], "--draw -1"),
        (["eval", "runs/detr_r50_k", "--batch-size", "0"], "--batch-size 0"),
        (["eval", "runs/detr_r50_k", "--threshold", "30"], "a score is a number of 0 to 1"),
        (["eval", "runs/detr_r50_k", "--root", "here"], "--root here: it belongs to --data"),
        (["eval", "runs/detr_r50_k", "-o", "scenes/train/0.png/x"], "0.png"),
        (["train", "detr_r50", "--data", "scenes", "--initial", "pretrained"], "for classifiers"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(run, arguments, message):
    before = sorted(run.rglob("*"))
    done = irpe(*arguments, cwd=run)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert sorted(run.rglob("*")) == before


def test_an_unfinished_run_is_evaluated_from_its_checkpoint(run, tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    for name in ("run.json", "checkpoint.pt"):
        (directory / name).write_bytes((run / "runs/detr_r50_k" / name).read_bytes())
    done = irpe("eval", str(directory), "--data", str(run / "scenes"), "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert torch.isfinite(torch.tensor(json.loads(done.stdout)["AP"]))


def test_a_run_goes_on_without_the_weights_that_its_backbone_came_with(run, tmp_path):
    config = frozen(run / "scenes")
    weights = tmp_path / "backbone.pth"
    shutil.copy(config.backbone_weights, weights)
    own = [
        "--set",
        f"backbone_weights={weights}",
        "--set",
        "backbone_lr=0",
        "--set",
        "cached_versions=1",
    ]
    options = [*LITTLE, *own, "--epochs", "2", "-o", str(tmp_path / "run")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IRPE_FEATURE_CACHE", str(tmp_path / "cache"))
        done = irpe("train", "detr_r50_k", "--data", "scenes", *options, cwd=run)
        assert done.returncode == 0, done.stderr
        weights.unlink()
        shutil.rmtree(tmp_path / "cache")
        done = irpe("train", "--resume", str(tmp_path / "run"), cwd=run)
        assert done.returncode == 0, done.stderr
        done = irpe("eval", str(tmp_path / "run"), "--json", cwd=run)
    assert done.returncode == 0, done.stderr
    table = read_metrics(tmp_path / "run")
    scores = json.loads(done.stdout)
    assert scores["AP50"] == pytest.approx(table["AP50"][-1], abs=1e-6)


def test_an_image_that_a_worker_cannot_read_is_told_in_one_line(tmp_path):
    make_scenes(tmp_path / "scenes")
    (tmp_path / "scenes/train/3.png").write_bytes(b"nothing")
    options = [*LITTLE, "--workers", "1"]
    done = irpe("train", "detr_r50_k", "--data", "scenes", *options, cwd=tmp_path)
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert "1 of 8 images cannot be read, more than max_broken = 0.001" in said
    assert "3.png" in said
    assert "Traceback" not in done.stderr
