"""The runs of an ablation: each once, found again, reported."""

import json

import pytest
from train.little import CONFIG, little

from irpe.ablation.cells import SHIFTS, measure_row_costs, plan_cells, run_cells
from irpe.ablation.report import markdown_table, write_report
from irpe.ablation.rows import AblationRow
from irpe.ablation.shifts import classify_shifted
from irpe.ablation.statistics import collect_rows
from irpe.progress import NO_PROGRESS, NoProgress
from irpe.train.classification.task import ClassificationTask
from irpe.train.processes import make_accelerator
from irpe.train.runs import load_run

BASE = CONFIG.replace(encoding="none", absolute="keep", epochs=1)
DATA = little()
ROWS = [AblationRow("absolute", "none", "keep"), AblationRow("K", "product-contextual-k", "none")]


class Watch(NoProgress):
    def __init__(self):
        self.steps, self.reports = [], {}

    def step(self, done, values):
        self.steps.append(done)

    def report(self, name, values):
        self.reports[name] = values


def test_cells_have_a_directory_for_each_configuration(tmp_path):
    cells = plan_cells(ROWS, BASE, 2, DATA, tmp_path)
    cells += plan_cells(ROWS, BASE.replace(epochs=3), 2, DATA, tmp_path)
    cells += plan_cells(ROWS, BASE, 2, little(40), tmp_path)
    assert len({cell.directory for cell in cells}) == 12
    assert [cell.config.seed for cell in cells[:4]] == [0, 0, 1, 1]
    again = plan_cells(ROWS, BASE, 2, DATA, tmp_path)
    assert [c.directory for c in again] == [c.directory for c in cells[:4]]


def test_two_rows_of_one_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match="two have the same name"):
        plan_cells([ROWS[0], ROWS[0]], BASE, 1, DATA, tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The cells of two rows and two seeds, and what they found."""
    cells = plan_cells(ROWS, BASE, 2, DATA, tmp_path_factory.mktemp("ablation"))
    watch = Watch()
    results = run_cells(cells, DATA, watch)
    assert watch.steps == [1, 2, 3, 4]
    assert [values["top1"] for values in watch.reports.values()] == [r.top1() for r in results]
    return cells, results


def test_finished_cells_are_not_run_again(finished):
    cells, results = finished
    stamps = [(cell.directory / "checkpoint.pt").stat().st_mtime_ns for cell in cells]
    assert run_cells(cells, DATA) == results
    assert stamps == [(c.directory / "checkpoint.pt").stat().st_mtime_ns for c in cells]


def test_a_cell_finds_what_an_evaluation_of_its_run_finds(finished):
    cells, results = finished
    for cell, result in zip(cells, results, strict=True):
        task = ClassificationTask(cell.config, *DATA)
        model, accelerator = load_run(cell.directory), make_accelerator()
        score = task.evaluate(model, accelerator)
        assert (result.correct[0], result.top1(), result.top5) == (
            score.correct,
            score.top1,
            score.top5,
        )
        assert list(result.correct) == classify_shifted(model, task.val_images, SHIFTS, accelerator)


def test_a_cell_that_ended_without_a_result_is_evaluated(finished):
    cells, results = finished
    (cells[0].directory / "result.json").unlink()
    assert run_cells(cells[:1], DATA) == results[:1]


def test_a_report_is_written(finished, tmp_path):
    cells, results = finished
    rows = collect_rows(results, measure_row_costs(cells, 10, rounds=1))
    write_report(tmp_path / "report", "Ablation", rows, cells)
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"report.md", "results.json", "top1.png", "curves.png"}
    content = json.loads((tmp_path / "report/results.json").read_text())
    assert [row["row"] for row in content["rows"]] == ["absolute", "K"]
    assert content["rows"][1]["parameters"] == rows[1].cost.parameters
    assert markdown_table(rows) in (tmp_path / "report/report.md").read_text()


def test_a_damaged_result_is_named(tmp_path):
    cell = plan_cells(ROWS, BASE, 1, DATA, tmp_path)[0]
    cell.directory.mkdir(parents=True)
    (cell.directory / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result.json is damaged.*remove"):
        run_cells([cell], DATA, NO_PROGRESS)
