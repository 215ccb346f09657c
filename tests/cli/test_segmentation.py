"""`irpe train`, `eval`, `ablate` and `show` of a segmenter, as a user calls them."""

import json

import pytest
from cli.terminal import irpe
from PIL import Image
from train.streets import CLASSES, CONFIG, SEGFORMER, VOID, make_streets, train

from irpe.cli.main import understand

LITTLE = [
    "--model-args", json.dumps(CONFIG.model_args), "--set", f"ignore_label={VOID}", "--set",
    "crop_height=16", "--set", "crop_width=32", "--epochs", "1",
]  # fmt: skip


def call(folder, *arguments):
    """Calls a command in this process, and returns nothing: it raises where it fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        command, values = understand([str(argument) for argument in arguments])
        command(**values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with data, names of classes and a run."""
    directory = tmp_path_factory.mktemp("segment")
    data = make_streets(directory / "streets", splits=("train", "val", "test"))
    (directory / "names.txt").write_text("\n".join(CLASSES))
    config = CONFIG.replace(epochs=1, class_names=str(directory / "names.txt"))
    train(data, directory / "run", config)
    return directory


def test_a_new_user_trains_and_evaluates(folder):
    done = irpe("train", "seg_small", "--data", "streets", *LITTLE, "--encoding",
                "product-contextual-k", cwd=folder)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "mIoU" in done.stderr
    assert "next: irpe eval runs/seg_small" in done.stdout
    assert "classes   3: 0, 1, 2" in done.stderr
    lines = (done.stderr + done.stdout).splitlines()
    assert [line for line in lines if len(line) > 79 and str(folder) not in line] == []


def test_scores_are_printed_and_saved(folder, capsys):
    call(folder, "eval", "run", "--json")
    values = json.loads(capsys.readouterr().out)
    assert values == json.loads((folder / "run/eval/scores.json").read_text())
    assert values["num_images"] == 8
    assert set(values["classes"]) == set(CLASSES)
    known = [iou for iou in values["classes"].values() if iou is not None]
    assert values["mIoU"] == pytest.approx(sum(known) / len(known))
    call(folder, "eval", "run")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("mIoU ")
    assert lines[1].startswith("mIoU: sky ")
    assert lines[-1].endswith("val; saved in run/eval")
    assert all(len(line) < 80 for line in lines[:-1])


def test_other_sizes_windows_and_splits_are_other_scores(folder, capsys, tmp_path):
    found = {}
    for name, options in {
        "plain": [],
        "large": ["--scale", "2"],
        "windows": ["--scale", "2", "--sliding"],
        "test": ["--split", "test"],
    }.items():
        call(folder, "eval", "run", "--json", "-o", tmp_path / name, *options)
        found[name] = json.loads(capsys.readouterr().out)
    assert len({found[name]["pixel_accuracy"] for name in found}) == 4
    assert [found[name]["sliding"] for name in found] == [False, False, True, False]


def test_pictures(folder, tmp_path, capsys):
    call(folder, "eval", "run", "--draw", "2", "-o", tmp_path / "here")
    names = sorted(path.name for path in (tmp_path / "here").iterdir())
    assert names == ["0000-0.png", "0001-1.png", "contact-sheet.png", "scores.json"]
    sheet, single = (Image.open(tmp_path / "here" / name) for name in (names[2], names[0]))
    with sheet, single:
        assert single.width > 3 * 224  # the image, the truth and the prediction
        assert sheet.width > 500


def test_a_segformer_is_trained_evaluated_and_looked_at(folder, tmp_path):
    """Its keys are pooled: most of its attentions are on two grids."""
    commands = (
        ["train", "seg_small", "--data", "streets", *LITTLE[2:], "--set", "model=segformer",
         "--model-args", json.dumps(SEGFORMER.model_args), "--encoding", "product-contextual-k",
         "-o", "segformer"],
        ["eval", "segformer", "--scale", "1.5"],
        ["show", "weights", "segformer", "streets/images/val/0.png", "-o", tmp_path / "w.png"],
        ["show", "attention", "segformer", "-o", tmp_path / "a.png", "--patch", "5,2",
         "--block", "0"],
        ["show", "locality", "segformer", "-o", tmp_path / "l.png"],
    )  # fmt: skip
    done = [irpe(*map(str, command), cwd=folder) for command in commands]
    assert [each.returncode for each in done] == [0] * len(done), [e.stderr for e in done]
    assert "segformer hidden_sizes=[8, 8, 16, 16]" in done[0].stderr
    assert done[1].stdout.startswith("mIoU ")
    assert "stages.3" in done[4].stdout
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("w.png", "a.png"))


@pytest.mark.parametrize("command", ["weights", "attention"])
def test_what_a_segmenter_attends_to(folder, tmp_path, command, capsys):
    image = folder / "streets/images/val/0.png"
    call(folder, "show", command, "run", image, "-o", tmp_path / "figure.png", "--block", 0)
    assert (tmp_path / "figure.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "run", "--root", "x"], "--root x: it belongs to --data"),
        (["eval", "run", "--scale", "0"], "scale = 0.0 must be greater than 0"),
        (["show", "robustness", "run", "--sizes", "a"], "'a': 'a' is not a number"),
        (["show", "robustness", "run", "--sizes", "17"], "at most 16"),
        (["eval", "run", "--threshold", "0.5"], "threshold 0.5 is not for segmentation"),
        (["eval", "run", "--split", "other"], "has no split 'other'; it has test, train, val"),
        (
            ["train", "seg_small", "-o", "new"],
            "data is missing: a folder of images with label maps",
        ),
        (
            ["train", "seg_small", "--set", "mixup=0.1"],
            "setting 'mixup'",
        ),
        (
            ["train", "seg_cityscapes", "--set", "model=segformer"],
            "head 'upsampling'",
        ),
        (
            ["train", "seg_small", "--set", "model=upernet", "--model-args", "{}"],
            "model_args {}",
        ),
        (
            ["train", "laptop", "--set", "sliding=true"],
            "setting 'sliding'",
        ),
        (["ablate", "--recipe", "seg_small", "--grid", "7"], "--grid 7 is for square images"),
    ],
)
def test_errors_say_what_to_do(folder, arguments, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        call(folder, *arguments)


@pytest.mark.slow
def test_an_ablation_by_miou(folder):
    done = irpe("ablate", "--recipe", "seg_small", "--data", "streets", *LITTLE, "--row",
                "absolute=none,keep", "--row", "K=product-contextual-k", "-o", "ablation",
                cwd=folder)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "K, seed 1: mIoU" in done.stderr
    results = json.loads((folder / "ablation/report/results.json").read_text())
    assert [len(row["mIoU"]) for row in results["rows"]] == [1, 1]
    assert (folder / "ablation/report/mIoU.png").is_file()
    again = irpe("ablate", "--recipe", "seg_small", "--data", "streets", *LITTLE, "--row",
                 "absolute=none,keep", "--row", "K=product-contextual-k", "-o", "ablation",
                 cwd=folder)  # fmt: skip
    assert again.returncode == 0, again.stderr
