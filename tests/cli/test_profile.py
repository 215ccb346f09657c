"""`irpe profile`, as a user calls it."""

import json
import sys

import pytest

pytest.importorskip("rich", reason="needs the extra 'cli'")
pytest.importorskip("timm", reason="needs the extra 'timm'")

from irpe.cli.commands.profile import paper_table
from irpe.cli.main import main
from irpe.core.encodings import NAMES
from irpe.models.paper import COSTS
from irpe.profile.comparison import compare_with_paper
from irpe.profile.cost import COMPARED

TINY = "deit_tiny_patch16_224"
SMALL = "test_vit"
QUICK = ["profile", TINY, "--image-size", "64", "--rounds", "0"]


@pytest.fixture
def irpe(monkeypatch, capsys):
    """Runs the program and returns what it prints, or the line with which it ends."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["irpe", *arguments])
        try:
            main()
        except SystemExit as end:
            return str(end.code)
        return capsys.readouterr().out

    return run


def test_a_table_of_at_most_80_columns(irpe):
    two = ["--encoding", "huang", "--encoding", "sasa"]
    lines = irpe("profile", SMALL, "--image-size", "64", "--rounds", "1", *two).splitlines()
    assert lines[0] == f"{SMALL}, 64 x 64"
    assert [line.split()[0] for line in lines[3:6]] == ["none", "huang", "sasa"]
    assert max(map(len, lines)) <= 80


def test_json_holds_the_values(irpe):
    found = json.loads(irpe(*QUICK, "--encoding", "shaw", "--json"))
    assert [row["encoding"] for row in found["rows"]] == ["none", "shaw"]
    assert found["rows"][1]["extra_parameters"] == 12 * 50 * 64
    assert found["rounds"] == 0


def test_resolutions(irpe):
    out = irpe("profile", SMALL, "--resolutions", "64,128")
    assert [line.split()[0] for line in out.splitlines()[3:5]] == ["64", "128"]
    assert "%" in out


def test_compare_lists_every_encoding(irpe):
    assert {"product-contextual-k", "product-contextual-qkv", *NAMES} - {"none"} < {*COMPARED}
    out = irpe("profile", SMALL, "--compare", "--image-size", "32", "--rounds", "0")
    assert [line.split()[0] for line in out.splitlines()[3 : 4 + len(COMPARED)]] == [
        "none",
        *COMPARED,
    ]


def test_what_does_not_fit_is_left_out_with_the_reason(irpe):
    swin = "swin_tiny_patch4_window7_224"
    out = irpe(
        "profile", swin, "--encoding", "axial-deeplab", "--encoding", "cpvt", "--rounds", "0"
    )
    assert "\naxial-deeplab " in out
    assert "\ncpvt is left out: cpvt cannot follow" in out
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.slow
def test_the_papers_tables(irpe):
    out = irpe("profile", "--paper")
    labels = [f"T{cost.table} {cost.label}" for cost in COSTS]
    assert [
        line[: len(label)] for label, line in zip(labels, out.splitlines()[3:], strict=False)
    ] == labels


def test_differences_to_the_paper_are_explained_below_the_table():
    costs = [cost for cost in COSTS if cost.label in ("DeiT-Ti", "DeiT-S iRPE-QKV")]
    _, headings, rows, notes = paper_table(compare_with_paper(costs))
    marks = {row[0]: row[headings.index("ok")] for row in rows}
    assert marks == {"T5 DeiT-Ti": "1", "T5 DeiT-S iRPE-QKV": "2"}
    assert [note[:2] for note in notes[1:]] == ["1:", "2:"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--paper", TINY], "--paper cannot be combined with MODEL"),
        (["--paper", "--compare"], "--paper cannot be combined with --compare"),
        (
            ["--resolutions", "64", "--rounds", "3"],
            "cannot be combined with --rounds",
        ),
        (["--resolutions", "64,big"], "'64,big'"),
        (
            ["--resolutions", "64", "--encoding", "shaw", "--encoding", "huang"],
            "one encoding, not shaw, huang",
        ),
        (["--compare", "--encoding", "shaw"], "--compare cannot be combined with --encoding"),
        (["--encoding", "shav"], "did you mean 'shaw'"),
        (["deit_tini_patch16_224"], "did you mean 'deit_tiny_patch16_224'"),
        (["resnet18"], "cannot be equipped"),
        (["resnet18", "--compare", "--rounds", "0"], "cannot be equipped"),
    ],
    ids=str,
)
def test_errors_are_one_line_and_come_before_the_work(irpe, arguments, message):
    line = irpe("profile", *arguments)
    assert line.startswith("irpe: ")
    assert message in line
    assert "\n" not in line


def test_the_path_of_a_model_is_not_a_name(irpe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("saved", SMALL):
        (tmp_path / name).mkdir()
    assert "MODEL 'saved' is a path: irpe profile takes the name of a model" in irpe(
        "profile", "saved"
    )
    assert irpe("profile", SMALL, "--image-size", "64", "--rounds", "0").startswith(SMALL)
