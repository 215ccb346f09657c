"""`irpe train`, `irpe eval` and `irpe ablate` as a user calls them."""

import itertools
import json
import os
import re
import signal
import threading
import time

import pytest
from cli.terminal import irpe
from PIL import Image

pytest.importorskip("accelerate", reason="needs the extra 'train'")

QUICK = [
    "--epochs", "1", "--warmup-epochs", "0", "--batch-size", "300", "--model-args",
    '{"patch_size": 7, "embed_dim": 16, "depth": 1, "num_heads": 2}',
]  # fmt: skip

ONE = ["--row", "K=product-contextual-k"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    directory = tmp_path_factory.mktemp("train")
    done = irpe("train", "laptop", "--encoding", "product-contextual-k", *QUICK, cwd=directory)
    assert done.returncode == 0, done.stderr
    assert "model: runs/laptop/model" in done.stdout
    assert re.search(r"^reached: top-1 [\d.]+  top-5 [\d.]+  loss \d\.\d{4}$", done.stdout, re.M)
    assert "effect: the attention's output changes by 0." in done.stdout
    assert "next: irpe eval runs/laptop" in done.stdout
    assert "epoch   1/1  train" in done.stderr
    assert "images    6,000 to train on, 2,000 to evaluate on (embedded)" in done.stderr
    assert "warning: the encoding is next to nothing" in done.stderr  # one block: see the last one
    assert "in the 20 steps that are left" in " ".join(done.stderr.split())
    return directory


def test_a_run_can_be_evaluated(run):
    done = irpe("eval", "runs/laptop", "--json", "--device", "cpu", cwd=run)
    score = json.loads(done.stdout)
    with (run / "runs/laptop/metrics.csv").open() as file:
        head, row = (line.strip().split(",") for line in file)
    assert score["top1"] == float(dict(zip(head, row, strict=True))["top1"])
    assert score["num_images"] == 2000
    plain = irpe("eval", "runs/laptop", cwd=run).stdout
    assert plain.startswith(f"top-1 {score['top1']:.2f}  top-5 ")


def test_a_failed_start_leaves_no_run(tmp_path):
    done = irpe("train", "laptop", "--set", "optimizer=adamwx", *QUICK, cwd=tmp_path)
    assert done.returncode == 1
    assert not (tmp_path / "runs/laptop/run.json").exists()


@pytest.mark.slow
def test_a_file_of_the_authors_can_be_evaluated(tmp_path):
    import timm
    from models.authors import random_tables, write

    from irpe import RPESpec

    name = "deit_tiny_patch16_224_ctx_product_50_shared_k"
    plain = timm.create_model("deit_tiny_patch16_224").state_dict()
    for block in range(12):
        tables = random_tables(RPESpec.parse("product-contextual-k"), 3, 64, 1, seed=block)
        plain |= {f"blocks.{block}.attn.{key}": value for key, value in tables.items()}
    path = write(tmp_path / f"{name}.pth", plain)
    for number in range(1000):  # as many classes as the model has
        folder = tmp_path / f"data/val/{number:04}"
        folder.mkdir(parents=True)
        Image.new("RGB", (30, 20), (number % 256, number // 4, 0)).save(folder / "0.png")
    done = irpe("eval", path.name, "--data", "data", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_images"] == 1000


def test_a_directory_with_a_run_in_it_is_not_overwritten(run):
    done = irpe("train", "laptop", cwd=run)
    assert done.returncode == 1
    assert "runs/laptop holds a run with other settings (encoding)" in done.stderr
    assert "--resume runs/laptop, or choose another folder, -o runs/laptop-none" in done.stderr


def test_a_misspelt_encoding_is_told_before_a_folder_that_is_taken(run):
    done = irpe("train", "laptop", "--encoding", "produkt-bias-k", cwd=run)
    assert done.returncode == 1
    assert "produkt" in done.stderr
    assert "holds a run" not in done.stderr


def test_resume_takes_everything_from_the_run(run):
    done = irpe("train", "--resume", "runs/laptop", "--epochs", "3", cwd=run)
    assert "--resume cannot be combined with" in done.stderr
    assert irpe("train", "--resume", "runs/laptop", cwd=run).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "laptopp"], "did you mean 'laptop'?"),
        (["train", "laptop", "--encoding", "produkt-bias-k"], "produkt"),
        (["train", "laptop", "--data", "nowhere"], "data 'nowhere' is not a folder"),
        (["train", "laptop", "--model-args", '{"num_heads": 0}'], "num_heads = 0 must be"),
        (["train", "laptop", "--image-size", "1"], "image_size = 1 is less than a patch"),
        (["train", "laptop", "--set", "crop=1e-9"], "crop = 1e-09 must be from 0.1 to 1"),
        (["train", "laptop", "-o", "/proc/run"], "cannot be written to"),
        (["train", "--resume", "nowhere"], "nowhere is not a run"),
        (["eval", "nowhere"], "nowhere is not a folder: pass the folder of a run"),
        (["eval", "nowhere.pth"], "nowhere.pth does not exist: fetch it from"),
        (["eval", ".", "--device", "gpu"], "device 'gpu' is not one of auto, cpu"),
        (["train", "laptop", "--log", "wandbb"], "--log 'wandbb' is not one of wandb"),
        (["eval", "nowhere", "--precision", "int8"], "'int8' is not one of no, bf16, fp16"),
        (["train", "laptop", "--set", "root=x"], "root 'x' is for datasets with a name"),
        (["train", "laptop", "--set", "auto_augment=rand-mfoo"], "'mfoo' is not a letter or name"),
        (
            ["train", "laptop", "--encoding", "product-contextual-k@1e9"],
            "more than any machine holds",
        ),
        (["show", "buckets", "--grid", "1000000x1000000"], "any machine holds"),
        (["show", "buckets", "product-contextual-k@1e300"], "write a smaller ratio or beta"),
        (["show", "robustness", ".", "--sizes", "9" * 5000], "run.json does not exist"),
        (["profile", "--resolutions", "9" * 5000], "write sizes such as"),
        (["train", "laptop", "--set", "model=deit_small"], "mean 'deit_small_patch16_224'?"),
        (
            ["train", "laptop", "--set", "flip=0.5", "--set", "model=vit_tiny"],
            "irpe: model 'vit_tiny' is",
        ),
        (["train", "laptop", "--set", "model=resnet18"], "'resnet18' is not a vision transformer"),
        (["ablate", "--table", "7"], "--table '7' is not one of 1, 2, 3, 4, buckets, modern"),
        (["ablate", "--table", "1", "--row", "a=K"], "cannot be combined"),
        (["ablate", "--grid", "5"], "--grid 5 does not divide the image of 28 pixels"),
        (["ablate", "--row", "K"], "is not of the form NAME=ENCODING"),
        (["ablate", "--row", "K=shaw", "--row", "K=huang"], "two have the same name"),
        (["ablate", "--row", "K=produkt-bias-k"], "produkt"),
        (["ablate", "--jobs", "0"], "jobs = 0 must be at least 1"),
        (["ablate", "--batch-size", "7000"], "batch_size = 7000 is more than the 6000 images"),
        (["ablate", "--tune", "--table-lr", "2"], "--tune cannot be combined with table_lr"),
        (["ablate", "--tune", "--row", "a=alibi-2d"], "none of the rows a has tables"),
        (["ablate", "--tune", *ONE, "--batch-size", "5000"], "--tune holds out 1200 training im"),
        (["ablate", "--table-lr", "0"], "table_lr = 0.0 must be greater than 0"),
        (
            ["train", "laptop", "--set", "absolute_lr=-1"],
            "absolute_lr = -1.0 must be greater than 0",
        ),
    ],
)
def test_errors_are_one_line_and_leave_nothing(tmp_path, arguments, message):
    done = irpe(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "checkpoint.pt"])
def test_a_file_of_a_saved_model_is_not_the_model(name, tmp_path):
    (tmp_path / "tuned").mkdir()
    (tmp_path / "tuned" / name).write_bytes(b"")
    done = irpe("eval", f"tuned/{name}", cwd=tmp_path)
    assert done.returncode == 1
    assert (
        f"tuned/{name} is one file: of a saved model or run, pass its folder, tuned" in done.stderr
    )


def test_an_ablation_is_not_a_run(tmp_path):
    (tmp_path / "ablation/cells").mkdir(parents=True)
    done = irpe("eval", "ablation", cwd=tmp_path)
    assert "is an ablation: name one of its runs, in ablation/cells" in done.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_saves_and_tells_how_to_go_on(number, code, tmp_path):
    def terminate():
        while not (tmp_path / "runs/laptop/metrics.csv").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=terminate, daemon=True).start()
    done = irpe("train", "laptop", *QUICK, "--epochs", "50", cwd=tmp_path)
    assert done.returncode == code
    assert "go on with: irpe train --resume runs/laptop" in done.stderr


def make_images(folder, names=("a", "b")):
    for split, label, number in itertools.product(("train", "val"), names, range(8)):
        (folder / split / label).mkdir(parents=True, exist_ok=True)
        Image.effect_noise((28, 28), 20 + 9 * number).save(folder / split / label / f"{number}.png")


@pytest.fixture
def on_folder(tmp_path):
    """Where a run on a folder of images was made, and its score."""
    make_images(tmp_path / "data")
    done = irpe("train", "laptop", "--data", "data", *QUICK, "--batch-size", "8", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "top-5" not in done.stdout  # there are two classes
    return tmp_path, irpe("eval", "runs/laptop", "--json", cwd=tmp_path).stdout


def test_images_that_a_run_was_trained_on_do_not_count(tmp_path):
    make_images(tmp_path / "data")
    whole = ["--data", "data/train", "--holdout", "0.25", "--batch-size", "4"]
    assert irpe("train", "laptop", *QUICK, *whole, cwd=tmp_path).returncode == 0
    own = irpe("eval", "runs/laptop", cwd=tmp_path).stdout
    assert re.match(r"top-1 [\d.]+  loss ", own)  # every class is among the first five
    assert f"4 images: the part of {tmp_path}/data/train held out in training;" in own
    (tmp_path / "link").symlink_to("data")
    for same in ("data/train", str(tmp_path / "data/train/"), "link/train"):
        assert irpe("eval", "runs/laptop", "--data", same, cwd=tmp_path).stdout == own
    other = irpe("eval", "runs/laptop", "--data", "data/val", cwd=tmp_path).stdout
    assert "16 images: all of data/val;" in other
    other = irpe("eval", "runs/laptop", "--data", "data", cwd=tmp_path).stdout
    assert "16 images: the val split of data;" in other
    refused = irpe("eval", "runs/laptop", "--data", "data/train", "--root", "x", cwd=tmp_path)
    assert "root 'x' is for datasets with a name" in refused.stderr


def test_data_whose_classes_were_renamed_is_refused(on_folder):
    directory, _ = on_folder
    for split in ("train", "val"):
        (directory / "data" / split / "a").rename(directory / "data" / split / "c")
    before = (directory / "runs/laptop/checkpoint.pt").read_bytes()
    for arguments in (["eval", "runs/laptop"], ["eval", "runs/laptop", "--data", "data"]):
        done = irpe(*arguments, cwd=directory)
        assert done.returncode == 1
        assert "data has other classes than the run was trained on" in done.stderr
        assert "class 0 is 'b', in the run 'a' (2 and 2 classes)" in done.stderr
    done = irpe("train", "--resume", "runs/laptop", cwd=directory)
    assert done.returncode == 1
    assert "class 0 is 'b', in the run 'a'" in done.stderr
    assert (directory / "runs/laptop/checkpoint.pt").read_bytes() == before


def test_the_data_of_a_run_is_found_from_another_folder(on_folder):
    directory, score = on_folder
    other = directory / "other"
    make_images(other / "data", ("x", "y"))
    found = json.loads(irpe("eval", "../runs/laptop", "--json", cwd=other).stdout)
    assert found["data"] == str(directory / "data")
    assert {**found, "path": ""} == {**json.loads(score), "path": ""}


ROWS = ["--row", "absolute=none,keep", "--row", "K=product-contextual-k"]


def test_an_ablation_ends_in_an_answer_and_finished_runs_are_kept(tmp_path):
    make_images(tmp_path / "data")
    options = [*ROWS, "--data", "data", "--recipe", "laptop", *QUICK, "--batch-size", "8"]
    options += ["--seeds", "1"]
    done = irpe("ablate", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = (line for line in done.stderr.splitlines() if line[:1].isalpha() and "  " in line)
    facts = dict(line.split(maxsplit=1) for line in lines)
    assert facts["images"].startswith("16 to train on, 16 to evaluate on")
    assert facts["augmentation"] == "none"  # rows that know directions are not mirrored
    assert facts["output"] == "runs/ablation-data-absolute-K"
    assert "2 steps per epoch" in done.stderr
    assert "[2/2] " in done.stderr
    assert ", moved by 1 " in done.stderr
    words = " ".join(done.stdout.split())
    assert "K is not compared: its encoding is next to nothing" in words  # as in the run above
    assert "absolute and K have not left chance (50.0 %)" in words
    assert "the same command with more --epochs" in words
    assert max(map(len, done.stdout.splitlines())) <= 80
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint.pt")}
    again = irpe("ablate", *options, "--json", cwd=tmp_path)
    assert len(json.loads(again.stdout)["rows"]) == 2
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint.pt")}
    other = irpe("ablate", *options, "--epochs", "2", cwd=tmp_path)
    assert other.returncode == 1
    assert "holds another ablation, which differs in epochs: choose another" in other.stderr


@pytest.mark.slow
def test_a_search_for_rates_comes_first_and_is_not_repeated(tmp_path):
    make_images(tmp_path / "data")
    options = [*ROWS, "--tune", "--data", "data", "--recipe", "laptop", *QUICK, "--batch-size", "4"]
    done = irpe("ablate", *options, "--seeds", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "search   first 12 cells, trained on 12 training images" in done.stderr
    assert "output   runs/ablation-data-absolute-K-tuned" in done.stderr
    assert "[12/12] " in done.stderr
    assert "[2/2] " in done.stderr
    assert "searched on held-out training images: absolute " in " ".join(done.stdout.split())
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint.pt")}
    again = json.loads(irpe("ablate", *options, "--seeds", "1", "--json", cwd=tmp_path).stdout)
    assert [search["row"] for search in again["search"]] == ["absolute", "K"]
    assert [len(search["tried"]) for search in again["search"]] == [6, 6]
    assert stamps == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("checkpoint.pt")}
    output = ["-o", "runs/ablation-data-absolute-K-tuned"]
    other = irpe("ablate", *[o for o in options if o != "--tune"], *output, cwd=tmp_path)
    assert "holds another ablation, which differs in tune" in other.stderr


def test_one_class_is_refused_and_shown(tmp_path):
    for split in ("train", "val"):
        (tmp_path / "data" / split / "cat").mkdir(parents=True)
        Image.effect_noise((28, 28), 20).save(tmp_path / "data" / split / "cat/0.png")
    for command in (["ablate", "--recipe", "laptop"], ["train", "laptop"]):
        done = irpe(*command, "--data", "data", *QUICK, cwd=tmp_path)
        assert done.returncode == 1
        assert "data has fewer than 2 classes: 1 images, such as " in done.stderr
    assert not (tmp_path / "runs").exists()
