"""Short runs, configurations as files, and what a command says at its end."""

import json
from subprocess import PIPE

import pytest
from cli.terminal import irpe
from PIL import Image
from torch import nn
from train.processes import start

pytest.importorskip("rich", reason="needs the extra 'cli'")
pytest.importorskip("timm", reason="needs the extra 'train'")
pytest.importorskip("accelerate", reason="needs the extra 'train'")

from irpe.cli.commands.train import _warn
from irpe.cli.parse import change_config
from irpe.errors import UserError
from irpe.recipes import RECIPES
from irpe.train.engine import FitResult

TINY = '{"depth": 1, "embed_dim": 16, "num_heads": 2, "patch_size": 7}'


@pytest.mark.parametrize(("epochs", "expected"), [(1, 0), (4, 0), (5, 1), (50, 1)])
def test_fewer_epochs_shrink_the_schedule_and_more_do_not(epochs, expected):
    changed, notes = change_config(RECIPES["laptop"](), {"epochs": epochs})
    assert (changed.epochs, changed.warmup_epochs) == (epochs, expected)
    assert ["warmup_epochs to 0" in note for note in notes] == [True] * (expected == 0)


def test_a_note_comes_when_the_run_begins_and_not_before_an_error(tmp_path):
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("L", (28, 28)).save(tmp_path / "data" / name / "0.png")
    short = ["laptop", "--epochs", "1", "--model-args", TINY, "--batch-size", "2"]
    done = irpe("train", *short, "--data", "nowhere", cwd=tmp_path)
    assert done.returncode == 1
    assert "warmup_epochs" not in done.stderr
    done = irpe("train", *short, "--data", "data", cwd=tmp_path)
    assert done.stderr.index("output") < done.stderr.index("shorten warmup_epochs to 0")
    done = irpe("ablate", "--epochs", "1", "--jobs", "0", cwd=tmp_path)
    assert "jobs = 0" in done.stderr
    assert "warmup_epochs" not in done.stderr


def test_a_recipe_without_an_encoding_says_which_option_gives_one(tmp_path):
    for name in ("train/a", "train/b", "val/a", "val/b"):
        (tmp_path / "data" / name).mkdir(parents=True)
        Image.new("L", (28, 28)).save(tmp_path / "data" / name / "0.png")
    short = ["laptop", "--epochs", "1", "--model-args", TINY, "--batch-size", "2", "--data", "data"]
    said = "no relative encoding: --encoding product-contextual-k would give it one"
    assert said in irpe("train", *short, "-o", "a", cwd=tmp_path).stderr
    chosen = irpe("train", *short, "-o", "b", "--encoding", "none", cwd=tmp_path)
    assert chosen.returncode == 0
    assert said not in chosen.stderr
    given = irpe("train", *short, "-o", "c", "--encoding", "shaw", cwd=tmp_path)
    assert given.returncode == 0
    assert said not in given.stderr
    for done in (chosen, given):
        assert max(map(len, (done.stderr + done.stdout).splitlines())) <= 80


def write_images(folder, count, mode="L"):
    """Writes images of two classes into one folder of class folders."""
    for index in range(count):
        path = folder / "ab"[index % 2]
        path.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((28, 28), 20 + index).convert(mode).save(path / f"{index}.png")


def test_images_left_out_of_an_epoch_are_told_when_a_run_begins(tmp_path):
    write_images(tmp_path / "data", 25)
    short = ["--data", "data", "--holdout", "0.2", "--epochs", "1", "--model-args", TINY]
    told = "1 step per epoch, 4 of 20 images left out of each: --batch-size 2 gives 10"
    run = ["train", "laptop", *short, "--batch-size", "16"]
    begun = irpe(*run, cwd=tmp_path)
    assert begun.returncode == 0, begun.stderr
    assert begun.stderr.splitlines().count(told) == 1
    assert told not in irpe("train", "--resume", "runs/laptop", cwd=tmp_path).stderr
    assert "per epoch" not in irpe(*run[:-1], "2", "-o", "b", cwd=tmp_path).stderr
    more = irpe(*run[:-1], "32", "-o", "c", cwd=tmp_path)
    assert "is more than the 20 images: choose a smaller one, such as 2" in more.stderr


def test_the_size_and_the_colours_of_the_input_are_told(tmp_path):
    write_images(tmp_path / "grey", 10, "RGB")
    for index, path in enumerate(sorted((tmp_path / "grey").rglob("*.png"))):
        other = tmp_path / "colour" / path.parent.name
        other.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (28, 28), (20 * index, 90, 160)).save(other / path.name)
    short = ["--holdout", "0.2", "--epochs", "1", "--model-args", TINY, "--batch-size", "2"]
    lost = "the images have colours, and are made grey: --channels 3 keeps the colours"
    said = {}
    for data, channels in (("grey", "1"), ("colour", "1"), ("colour", "3")):
        options = ["--data", data, "--set", f"channels={channels}", "-o", data + channels]
        said[data, channels] = irpe("train", "laptop", *short, *options, cwd=tmp_path).stderr
    assert "\ninput     28 x 28 pixels, grey\n" in said["colour", "1"]
    assert "\ninput     28 x 28 pixels, colour\n" in said["colour", "3"]
    assert [lost in text for text in said.values()] == [False, True, False]


@pytest.mark.parametrize(("encoding", "names"), [("shaw", True), ("rope-axial", False)])
def test_an_encoding_without_tables_is_not_told_to_raise_their_rate(encoding, names):
    fitted = FitResult(nn.Identity(), [{"effect": 0.0001}], None)
    said = " ".join(_warn(fitted, RECIPES["laptop"]().replace(encoding=encoding)))
    assert said.startswith("warning: the encoding is next to nothing")
    assert ("tables" in said) == names
    assert "train longer" in said


WITHOUT_TORCH = [
    "train no_such_recipe", "train laptop_64 --data nowhere", "train laptop_64 --data .",
    "train laptop_64 --data nowhere --holdout 0.2", "train detr_small --data nowhere",
    "train detr_small --data .", "train detr_small", "train seg_small",
    "train seg_small --data nowhere", "train --resume nowhere", "train laptop -o taken",
    "ablate --data nowhere", "ablate --grid 5",
    "ablate --seeds 0", "ablate nowhere",
    "ablate --slurm partition=gpu", "eval nowhere", "eval ablation",
    "eval taken --data nowhere", "show weights nowhere", "show tables ablation",
    "explore nowhere", "show training nowhere", "show robustness ablation", "show no",
    "--version", "train --help", "train laptop --show",
]  # fmt: skip
ASK = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from irpe.cli.main import main
found = {}
for command in json.loads(sys.argv[1]):
    sys.argv, out = ["irpe", *command.split()], io.StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        try:
            main()
            found[command] = "0"
        except SystemExit as end:
            found[command] = str(end.code or 0)
    found[f"{command}: before that"] = out.getvalue()
    heavy = [name for name in ("torch", "timm", "accelerate", "matplotlib") if name in sys.modules]
    if heavy:
        sys.exit(f"{command} imports {', '.join(heavy)}")
print(json.dumps(found))
"""


def test_what_is_wrong_at_sight_is_told_before_anything_slow_is_imported(tmp_path):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/letter.txt").write_text("dear")
    (tmp_path / "ablation/cells").mkdir(parents=True)
    asked = start("-c", ASK, json.dumps(WITHOUT_TORCH), cwd=tmp_path, text=True, stdout=PIPE)
    told = json.loads(asked.communicate()[0])
    assert asked.returncode == 0
    assert "comparing none, absolute, " in told["ablate --data nowhere: before that"]
    assert "seeds = 0" in told["ablate --seeds 0"]
    assert "needs --cluster slurm" in told["ablate --slurm partition=gpu"]
    assert "ablation.json" in told["ablate nowhere"]
    assert "has no train images" in told["train laptop_64 --data ."]
    assert "'nowhere' does not exist" in told["train laptop_64 --data nowhere --holdout 0.2"]
    assert "has neither annotations" in told["train detr_small --data ."]
    assert told["train detr_small"].startswith("irpe: --data is missing: a folder in the layout")
    assert told["train seg_small"].startswith("irpe: --data is missing: a folder of images")
    assert "is an ablation: name one of its runs" in told["show tables ablation"]
    fine = [command for command, code in told.items() if code == "0"]
    assert fine == ["--version", "train --help", "train laptop --show"]


def test_a_step_schedule_shrinks_in_proportion():
    changed, _ = change_config(RECIPES["detr_small"](), {"epochs": 65})
    assert changed.low_lr_epochs == RECIPES["detr_small"]().low_lr_epochs // 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 2, "warmup_epochs": 3}, "warmup_epochs = 3 .* epochs = 2"),
        ({"epochs": 0}, "epochs = 0"),
        ({"absolute": "x"}, "absolute 'x'"),
        ({"table_lr": 0.0}, "table_lr = 0.0"),
    ],
)
def test_errors_name_settings_and_values(changes, message):
    with pytest.raises(UserError, match=message):
        change_config(RECIPES["laptop"](), changes)


def test_settings_are_shown_and_given_back(tmp_path):
    done = irpe("train", "laptop", "--epochs", "1", "--model-args", TINY, "--show", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "mine.json").write_text(done.stdout)
    again = irpe("train", "--config", "mine.json", "--lr", "0.5", "--show", cwd=tmp_path)
    before, after = json.loads(done.stdout), json.loads(again.stdout)
    assert {name for name in before if before[name] != after[name]} == {"lr", "sha256"}
    both = irpe("train", "laptop", "--config", "mine.json", cwd=tmp_path)
    assert both.returncode == 1
    assert "cannot be combined with the recipe laptop" in both.stderr
    wrong = irpe("train", "--config", "mine.json", "--device", "gpu", cwd=tmp_path)
    assert "device 'gpu' is not one of auto, cpu" in wrong.stderr
    assert not (tmp_path / "runs").exists() or not any((tmp_path / "runs").rglob("*"))


def test_the_list_of_recipes_begins_with_what_a_laptop_can_run(tmp_path):
    lines = irpe("train", "--help", cwd=tmp_path).stdout.splitlines()
    first, last = lines.index("recipes for a laptop:"), lines.index("recipes for GPUs:")
    small = [line.split()[0] for line in lines[first + 1 : last] if line[2] != " "]
    assert small == ["laptop", "laptop_64", "detr_small", "seg_small"]
    assert {*RECIPES} <= {line.split()[0] for line in lines if line.startswith("  ")}
