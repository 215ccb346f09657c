"""Ablations: moved images, kept cells, and words that claim no more than the data."""

import json

import pytest
import torch
from train.little import CONFIG, little

from irpe.ablation.cells import Cost, Result, Row, make_mover, measure_costs, plan, run_cells
from irpe.ablation.report import compare, make_lines, markdown_table, sentences, write_report
from irpe.train.logs import Silence

BASE = CONFIG.replace(encoding="none", absolute="keep", epochs=1)
DATA = little()
ROWS = [Row("absolute", "none", "keep"), Row("K", "product-contextual-k", "none")]


class Quiet:
    def __init__(self):
        self.begun, self.ended = [], []

    def begin(self, cell):
        self.begun.append(cell)
        return Silence()

    def end(self, cell, result):
        self.ended.append(result)


@pytest.mark.parametrize("patches", [1, 2])
def test_moving_equals_a_loop(patches):
    images = torch.randn(5, 2, 8, 6)
    moved = make_mover(patches, 2, torch.tensor([-7.0, -6.0]))(images)
    distance = 2 * patches
    for number in range(5):
        down, right = [(0, 1), (1, 0), (0, -1), (-1, 0)][number % 4]
        for row in range(8):
            for column in range(6):
                y, x = row - down * distance, column - right * distance
                inside = 0 <= y < 8 and 0 <= x < 6
                expected = images[number, :, y, x] if inside else torch.tensor([-7.0, -6.0])
                assert torch.equal(moved[number, :, row, column], expected)


def test_moving_by_nothing_changes_nothing():
    images = torch.randn(5, 1, 8, 6)
    assert torch.equal(make_mover(0, 2, torch.zeros(1))(images), images)


def test_cells_have_a_place_for_each_configuration(tmp_path):
    cells = plan(ROWS, BASE, 2, DATA, tmp_path)
    cells += plan(ROWS, BASE.replace(epochs=3), 2, DATA, tmp_path)
    cells += plan(ROWS, BASE, 2, little(40), tmp_path)
    assert len({cell.directory for cell in cells}) == 12
    assert [cell.config.seed for cell in cells[:4]] == [0, 0, 1, 1]
    again = plan(ROWS, BASE, 2, DATA, tmp_path)
    assert [c.directory for c in again] == [c.directory for c in cells[:4]]


def test_two_rows_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two have the same name"):
        plan([ROWS[0], ROWS[0]], BASE, 1, DATA, tmp_path)


def test_finished_cells_are_kept_and_a_report_is_written(tmp_path):
    cells = plan(ROWS, BASE, 2, DATA, tmp_path)
    first = run_cells(cells, DATA, Quiet())
    stamps = [(cell.directory / "checkpoint.pt").stat().st_mtime_ns for cell in cells]
    table = Quiet()
    again = run_cells(cells, DATA, table)
    assert (again, table.ended) == (first, first)
    assert stamps == [(c.directory / "checkpoint.pt").stat().st_mtime_ns for c in cells]
    lines = make_lines(first, measure_costs(cells, 10, rounds=1))
    write_report(tmp_path / "report", "Ablation", lines, cells)
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"report.md", "results.json", "top1.png", "curves.png"}
    content = json.loads((tmp_path / "report/results.json").read_text())
    assert [row["row"] for row in content["rows"]] == ["absolute", "K"]
    assert content["rows"][1]["parameters"] == lines[1].cost.parameters
    assert markdown_table(lines) in (tmp_path / "report/report.md").read_text()


def test_a_damaged_result_is_named(tmp_path):
    cell = plan(ROWS, BASE, 1, DATA, tmp_path)[0]
    cell.directory.mkdir(parents=True)
    (cell.directory / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result.json is damaged.*remove"):
        run_cells([cell], DATA, Quiet())


def line(name, *hits):
    """A row of which each seed tells the first `hits` of 100 images right."""
    results = [
        Result(name, seed, ("1" * count + "0" * (100 - count),) * 3, 99.0)
        for seed, count in enumerate(hits)
    ]
    return make_lines(results, {name: Cost(1, 1, 1.0)})[0]


def test_differences_inside_the_spread_are_ties():
    base = line("absolute", 60, 64)
    assert compare(line("x", 90, 94), base) == "better"
    assert compare(line("x", 30, 34), base) == "worse"
    assert compare(line("x", 63, 94), base) == "tie"  # the seeds overlap
    assert compare(line("x", 65, 65), line("y", 63, 64)) == "tie"  # within two standard errors
    assert compare(line("x", 90), base) == "unknown"


def test_the_words_name_what_is_compared():
    text = sentences([line("absolute", 60, 64), line("K", 90, 94), line("V", 60, 64)])
    assert "100 test images, 2 seeds" in text[0]
    assert text[1] == (
        "Images as they are: better than absolute: K (+30.0); tie with absolute: V (+0.0)."
    )
    assert text[3].startswith("Images moved by 2 patches: ")


def test_one_seed_claims_nothing():
    text = sentences([line("absolute", 60), line("K", 90)])
    assert len(text) == 2
    assert "no difference is claimed" in text[1]
