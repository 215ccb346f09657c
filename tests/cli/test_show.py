"""`irpe show`: each command writes its file and says so; wrong input is one clear line."""

import json
import re
import shutil

import pytest
import torch
from cli import terminal

import irpe

pytest.importorskip("rich", reason="needs the extra 'cli'")
pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
timm = pytest.importorskip("timm", reason="needs the extra 'timm'")


from irpe.tasks.classify.config import ClassifierConfig  # noqa: E402
from irpe.tasks.classify.task import build_model  # noqa: E402
from irpe.train.run import Run  # noqa: E402

METRICS = (
    "epoch,lr,train_loss,val_loss,top1,top5,seconds\n1,0.1,2,1.5,40,80,10\n2,0.1,1,1,60,90,10\n"
)

pytestmark = pytest.mark.filterwarnings("ignore:parameter_groups without lr")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run on grey pictures of 28 x 28, on a grid of 7 x 7."""
    folder = tmp_path_factory.mktemp("runs") / "k"
    torch.manual_seed(0)
    config = ClassifierConfig(
        model="vit_tiny_patch16_224",
        model_args={"patch_size": 4, "embed_dim": 32, "num_heads": 2, "depth": 3},
        encoding="product-contextual-k",
        image_size=28,
        channels=1,
        drop_path=0.0,
    )
    model = build_model(config, 10)
    for table in irpe.parameter_groups(model, 0.05)[1]["params"]:
        torch.nn.init.normal_(table, std=0.2)
    irpe.save_equipped(model, folder / "model")
    (folder / "run.json").write_text(config.to_json())
    (folder / "metrics.csv").write_text(METRICS)
    return folder


@pytest.fixture
def show(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        words = arguments if arguments[0] == "explore" else ("show", *arguments)
        return terminal.irpe(*words, cwd=tmp_path)

    return call


@pytest.mark.parametrize(
    ("command", "ending"),
    [
        (["index"], "png"),
        (["index", "--index", "1.9:3.8:15.2", "--clip", "3"], "svg"),
        (["buckets", "cross-bias-k", "--grid", "3x5", "--at", "1,4"], "svg"),
        (["buckets", "product-bias-k", "--keys", "2x3", "--grid", "4x9"], "svg"),
        (["weights", "RUN"], "svg"),
        (["weights", "RUN", "--block", "-1", "--head", "0", "--head", "1"], "png"),
        (["attention", "RUN", "--patch", "1,5", "--head", "1"], "png"),
        (["cost", "test_vit", "--resolutions", "64,128"], "svg"),
        (["cost", "test_vit", "--compare", "--encoding", "shaw"], "png"),
        (["tables", "RUN", "--block", "1"], "svg"),
        (["locality", "RUN"], "png"),
        (["training", "RUN"], "svg"),
    ],
)
def test_figures_are_written_where_asked(show, run, tmp_path, command, ending):
    done = show(*(run if word == "RUN" else word for word in command), "-o", f"out.{ending}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"wrote out.{ending}"
    start = (tmp_path / f"out.{ending}").read_bytes()[:5]
    assert start == (b"\x89PNG\r" if ending == "png" else b"<?xml")


def test_files_have_the_names_of_their_commands_by_default(show, run, tmp_path):
    for command in (["index"], ["tables", run], ["training", run], ["explore"]):
        assert show(*command).returncode == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"index.png", "tables.png", "training.png", "explorer.html"}


def test_a_picture_of_the_user_changes_what_is_seen(show, run, tmp_path):
    from PIL import Image

    Image.effect_noise((50, 30), 90).save(tmp_path / "noise.png")
    assert show("weights", run, "-o", "scene.png").returncode == 0
    assert show("weights", run, "noise.png", "-o", "other.png").returncode == 0
    assert (tmp_path / "scene.png").read_bytes() != (tmp_path / "other.png").read_bytes()


def test_a_saved_model_serves_as_well_as_a_run(show, run, tmp_path):
    assert show("weights", run, "-o", "run.png").returncode == 0
    assert show("weights", run / "model", "-o", "model.png").returncode == 0
    assert (tmp_path / "run.png").read_bytes() == (tmp_path / "model.png").read_bytes()


def test_weights_draw_the_first_and_the_last_but_one_by_default(show, run, tmp_path):
    assert show("weights", run, "-o", "default.png").returncode == 0
    assert show("weights", run, "--block", "0", "--block", "1", "-o", "same.png").returncode == 0
    assert (tmp_path / "default.png").read_bytes() == (tmp_path / "same.png").read_bytes()


def test_windows_are_drawn_without_the_picture(show, tmp_path):
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=32)
    irpe.save_equipped(irpe.equip(model, "cross-contextual-k"), tmp_path / "swin")
    assert show("attention", tmp_path / "swin", "--block", "0").stdout == "wrote attention.png\n"
    done = show("explore", tmp_path / "swin", "--block", "0")
    assert "windows" in done.stderr
    assert not (tmp_path / "explorer.html").exists()


def test_locality_prints_its_numbers(show, run):
    from irpe import viz

    model = irpe.load_equipped(run / "model")
    calls = viz.capture(model, viz.image_input(model, viz.default_image())[0])
    measured = viz.measure_locality(calls)
    lines = show("locality", run).stdout.splitlines()
    assert lines[2].split() == ["block", "with", "zero", "change", "uniform"]
    for number, line in enumerate(lines[3:6]):
        name, with_it, without, change, uniform = line.split()
        assert name == f"blocks.{number}.attn"
        assert float(with_it) == pytest.approx(measured.with_encoding[number], abs=6e-4)
        assert float(without) == pytest.approx(measured.without_encoding[number], abs=6e-4)
        expected = measured.with_encoding[number] - measured.without_encoding[number]
        assert float(change) == pytest.approx(expected, abs=6e-4)
        assert float(uniform) == pytest.approx(measured.uniform[number], abs=6e-4)


def test_locality_averages_over_pictures(show, run, tmp_path):
    from PIL import Image

    for number in (1, 2):
        Image.linear_gradient("L").rotate(90 * number).save(tmp_path / f"{number}.png")
    outputs = [show("locality", run, *names).stdout for names in (["1.png"], ["1.png", "2.png"])]
    assert outputs[0] != outputs[1]
    assert outputs[0] == show("locality", run, "1.png", "1.png").stdout


def test_the_explorer_holds_the_chosen_blocks_of_the_run(show, run, tmp_path):
    done = show("explore", run, "--block", "2", "-o", "page.html")
    assert done.stdout == "wrote page.html\n"
    page = (tmp_path / "page.html").read_text()
    learned = json.loads(page.split('id="run">')[1].split("</script>")[0])
    assert learned["name"] == "k"
    assert [block["name"] for block in learned["blocks"]] == ["blocks.2.attn"]
    assert show("explore", run, "-o", "page.html").returncode == 0
    learned = (tmp_path / "page.html").read_text().split('id="run">')[1]
    assert learned.count('"name":"blocks.') == 3


WRONG = {
    "is not a folder": ["weights", "nowhere"],
    "does not exist: pass the file of an image": ["weights", "RUN", "nowhere.png"],
    "block 3 does not exist: the model has 0 to 2": ["weights", "RUN", "--block", "3"],
    "head 2 does not exist": ["attention", "RUN", "--head", "2"],
    r"patch \(7, 0\) is not on the grid 7x7": ["attention", "RUN", "--patch", "7,0"],
    "write row,column": ["attention", "RUN", "--patch", "7"],
    "grid 7 has 1 axes: a picture needs rows and columns": ["buckets", "--grid", "7"],
    "write rows x columns, 7x28": ["buckets", "--grid", "7x0"],
    "--points nowhere.txt does not exist": ["buckets", "--points", "nowhere.txt"],
    "--points cannot be combined with --keys": ["buckets", "--points", "a.txt", "--keys", "2x2"],
    "--keys 7 has 1 axes, the queries 2": ["buckets", "--keys", "7"],
    "have no rank among": ["buckets", "quantization-bias-k", "--keys", "7x7"],
    "method 'produkt' is not one of": ["buckets", "produkt-bias-k"],
    "is not a piecewise function": ["index", "--index", "clip3"],
    r"must end with \.png or \.svg": ["index", "-o", "index.pdf"],
    r"must end with \.html": ["explore", "-o", "page.png"],
    "belong to a run": ["explore", "--image", "a.png"],
    "is not a folder: pass the folders of runs": ["training", "RUN", "nowhere"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_an_error_that_says_why_and_writes_nothing(show, run, tmp_path, message):
    done = show(*(run if word == "RUN" else word for word in WRONG[message]))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.search(message, done.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_set_of_points_is_drawn_from_a_file(show, tmp_path):
    file = tmp_path / "points.txt"
    file.write_text("0.5, 1\n2 3.25\n7,7\n")
    done = show("buckets", "cross-bias-k", "--points", file, "-o", tmp_path / "points.svg")
    assert done.returncode == 0
    assert (tmp_path / "points.svg").stat().st_size > 1000
    for text, message in (("1 2 3", "line 1: '1 2 3' is not a row"), ("", "is empty")):
        file.write_text(text)
        done = show("buckets", "--points", file, "-o", tmp_path / "other.svg")
        assert (done.returncode, message in done.stderr) == (1, True)
        assert not (tmp_path / "other.svg").exists()


def test_the_program_says_what_is_wrong_in_one_line(tmp_path):
    done = terminal.irpe("show", "buckets", "--grid", "14-14", cwd=tmp_path)
    expected = "irpe: grid '14-14' is not understood: write rows x columns, 7x28"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", expected)


def test_runs_of_an_ablation_are_named_after_their_rows(show, run, tmp_path):
    finished, unfinished = tmp_path / "x-0-01234567", tmp_path / "absolute---K-1-89abcdef"
    for directory in (finished, unfinished):
        shutil.copytree(run, directory)
    (finished / "result.json").write_text(json.dumps({"row": "absolute + K", "seed": 0}))
    names = [Run(path).label for path in (finished, unfinished, run)]
    assert names == ["absolute + K", "absolute---K", "k"]
    assert show("training", finished, unfinished, run).returncode == 0
