"""`irpe show robustness` as a user calls it."""

import json

import pytest
from cli.terminal import irpe

pytest.importorskip("accelerate", reason="needs the extra 'train'")
pytest.importorskip("matplotlib", reason="needs the extra 'viz'")

from train import streets
from train.little import CONFIG, little, write_run

from irpe.cli.commands.robustness import label_encodings, name_groups
from irpe.tasks.classify.task import build_model
from irpe.tasks.detect.config import DetectorConfig
from irpe.train.run import Run

ABSOLUTE = CONFIG.replace(encoding="none", absolute="keep")
SEGMENTER = streets.CONFIG.replace(epochs=1)
NAMES = ["absolute-0", "absolute-1", "K-0"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with three runs and ten images, one of each class."""
    folder = tmp_path_factory.mktemp("robustness")
    write_run(folder / "absolute-0", ABSOLUTE)
    write_run(folder / "absolute-1", ABSOLUTE.replace(seed=1))
    write_run(folder / "K-0", CONFIG.replace(encoding="product-contextual-k"))
    (folder / "detector").mkdir()
    (folder / "detector/run.json").write_text(DetectorConfig().to_json())
    source = little()[1].source
    first = {source.read(number)[1]: number for number in reversed(range(200))}
    for label, number in sorted(first.items()):
        (folder / f"photos/val/{label}").mkdir(parents=True)
        source.read(number)[0].save(folder / f"photos/val/{label}/0.png")
    return folder


def show(place, *arguments):
    return irpe("show", "robustness", *arguments, cwd=place)


def test_the_own_size_and_move_0_give_what_irpe_eval_gives(place):
    done = show(place, "absolute-0", "K-0", "--sizes", "28", "--moves", "0", "-o", "own.svg")
    assert done.returncode == 0, done.stderr
    for run in json.loads((place / "own.json").read_text())["runs"]:
        top1 = json.loads(irpe("eval", run["path"], "--json", cwd=place).stdout)["top1"]
        assert 0 < top1 < 100
        assert (run["top1_by_size"], run["top1_by_move"]) == ({"28": top1}, {"0": top1})
    assert (place / "own.svg").read_bytes()[:5] == b"<?xml"


def test_seeds_are_drawn_and_printed_as_one(place):
    done = show(place, *NAMES, "--data", "photos", "--sizes", "35,14,28", "-o", "all.png")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[1].split() == ["14", "28", "35"]
    assert lines[5].split() == ["0", "1", "2", "3"]
    assert lines[-2:] == ["wrote all.json", "wrote all.png"]
    assert max(map(len, lines)) <= 80
    runs = json.loads((place / "all.json").read_text())["runs"]
    told = [(run["path"], run["label"], run["seed"], run["data"]) for run in runs]
    labels = ["absolute", "absolute", "K"]
    assert told == list(zip(NAMES, labels, [0, 1, 0], ["photos"] * 3, strict=True))
    for line, axis in ((2, "top1_by_size"), (6, "top1_by_move")):
        one, two, three = (list(run[axis].values()) for run in runs)
        means = [f"{(a + b) / 2:.1f}±{abs(a - b) / 2:.1f}" for a, b in zip(one, two, strict=True)]
        assert lines[line].split() == ["absolute", *means]
        assert lines[line + 1].split() == ["K", *(f"{score:.1f}" for score in three)]
    assert (place / "all.png").read_bytes()[:5] == b"\x89PNG\r"


def test_json_is_what_is_written_and_labels_are_the_users(place):
    more = ["--label", "fixed", "--label", "a label that is far too long for a narrow column"]
    done = show(place, *NAMES, "--data", "photos", *more, "--json", "-o", "named.png")
    assert done.stdout == (place / "named.json").read_text()
    runs = json.loads(done.stdout)["runs"]
    assert [run["label"] for run in runs] == ["fixed", "fixed", more[-1]]
    assert list(runs[0]["top1_by_size"]) == ["21", "28", "35", "42"]
    assert list(runs[0]["top1_by_move"]) == ["0", "1", "2", "3"]
    sizes = ",".join(str(7 * n) for n in range(1, 9))
    done = show(place, *NAMES, "--data", "photos", *more, "--sizes", sizes, "-o", "named.png")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "49" in done.stdout


WRONG = {
    "the runs are of classification and detection": ["K-0", "detector"],
    "nowhere is not a folder: pass the folder of a run": ["nowhere"],
    "K-0 is given twice: give each run once": ["K-0", "./K-0/../K-0"],
    "size 30 is not a multiple of 7, the side of a patch: choose 28 or 35": [
        "K-0", "--sizes", "28,28x30",
    ],
    "choose 0 to 3": ["K-0", "--moves", "0,4"],
    "--sizes: '28;35' is not a size": ["K-0", "--sizes", "28;35"],
    "choose 0 to": ["K-0", "--moves=-1"],
    "2 labels for 1 groups of runs": ["K-0", "--label", "a", "--label", "b"],
    "must end with .png or .svg": ["K-0", "-o", "wrong.pdf"],
    "the folder none does not exist": ["K-0", "-o", "none/wrong.png"],
    "is not a folder, a timm dataset": ["K-0", "--data", "elsewhere"],
}  # fmt: skip


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_one_line_and_writes_nothing(place, message):
    before = sorted(place.iterdir())
    arguments = WRONG[message] if "-o" in WRONG[message] else [*WRONG[message], "-o", "wrong.png"]
    done = show(place, *arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert done.stderr.startswith("irpe: ")
    assert done.stderr.count("\n") == 0
    assert sorted(place.iterdir()) == before


def test_sizes_that_are_not_square(place):
    done = show(place, "K-0", "--data", "photos", "--sizes", "28,14x35", "--json", "-o", "n.png")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert list(run["top1_by_size"]) == ["14x35", "28"]


def test_segmenters_are_seen_at_other_scales_whole_and_in_windows(tmp_path):
    streets.train(streets.make_streets(tmp_path / "data", 4), tmp_path / "run", SEGMENTER)
    done = show(tmp_path, "run", "--sizes", "1,1.5", "--json", "-o", "s.png")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    for key, sliding in (("mIoU_by_scale", []), ("mIoU_by_scale_sliding", ["--sliding"])):
        done = irpe("eval", "run", "--scale", "1.5", *sliding, "--json", cwd=tmp_path)
        assert run[key]["1.5"] == json.loads(done.stdout)["mIoU"]


def test_other_classes_are_an_error(place):
    (place / "few/val/one").mkdir(parents=True)
    (place / "few/val/one/0.png").write_bytes((place / "photos/val/1/0.png").read_bytes())
    done = show(place, "K-0", "--data", "few")
    assert done.stderr == "irpe: few has 1 classes, the model 10"


@pytest.mark.parametrize(
    ("encoding", "absolute", "expected"),
    [
        ("none", "keep", "absolute"),
        ("none", "none", "none"),
        ("none", "sinusoid", "sinusoid"),
        ("product-contextual-k", "none", "K"),
        ("product-contextual-qk", "sinusoid", "sinusoid + QK"),
        ("product-contextual-qkv", "keep", "absolute + QKV"),
        ("product-bias-k", "none", "product-bias-k"),
        ("product-contextual-k@1.9", "keep", "absolute + product-contextual-k@1.9"),
    ],
)
def test_labels_tell_the_encodings(encoding, absolute, expected):
    config = CONFIG.replace(encoding=encoding, absolute=absolute)
    assert label_encodings(config, build_model(config, 10)) == expected


@pytest.mark.parametrize(("bias", "expected"), [("keep", "built-in bias + K"), ("drop", "K")])
def test_a_swin_has_no_absolute_encoding_to_tell_of(bias, expected):
    config = CONFIG.replace(
        model="swin_tiny_patch4_window7_224",
        model_args={"embed_dim": 12, "depths": (1, 1), "num_heads": (1, 2)},
        encoding="product-contextual-k",
        absolute="keep",
        builtin_bias=bias,
    )
    assert label_encodings(config, build_model(config, 10)) == expected


def test_groups_have_the_names_that_are_given_or_made(tmp_path):
    both = CONFIG.replace(encoding="product-contextual-k", absolute="keep")
    configs = [ABSOLUTE, both, ABSOLUTE.replace(seed=1)]
    paths = [Run(write_run(tmp_path / str(n), config)) for n, config in enumerate(configs)]
    assert name_groups(paths, []) == ["absolute", "absolute + K", "absolute"]
    assert name_groups(paths, ["x", "y"]) == ["x", "y", "x"]
    with pytest.raises(ValueError, match=r"1 labels for 2 groups of runs.* in the order of .*0, "):
        name_groups(paths, ["x"])
    with pytest.raises(ValueError, match="two groups of runs are called 'x', and differ in enc"):
        name_groups(paths, ["x", "x"])
    paths.append(Run(write_run(tmp_path / "3", ABSOLUTE.replace(lr=0.5, seed=4))))
    with pytest.raises(
        ValueError, match=r"called 'absolute', and differ in lr: give each of the 3"
    ):
        name_groups(paths, [])
