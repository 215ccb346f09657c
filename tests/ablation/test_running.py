"""Cells in processes: the same numbers however many, stopped together, failures named."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ablation.small import ROWS, small_cells, write_images

from irpe.ablation.cells import run_cell
from irpe.ablation.costs import measure_row_costs, tasks_of_rows
from irpe.ablation.report import AblationReport, markdown_table
from irpe.ablation.rows import AblationRow
from irpe.ablation.running import NoBoard, run_cells
from irpe.ablation.statistics import collect_rows
from irpe.tasks.classify.task import open_task
from irpe.train.signals import StoppedError


class Watch(NoBoard):
    def __init__(self, act=lambda cell, fraction: None):
        self.ended, self.act = {}, act

    def step(self, cell, fraction, remaining):
        assert 0 < fraction <= 1
        assert remaining >= 0
        self.act(cell, fraction)

    def end(self, cell, found):
        self.ended[cell.name] = found


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """The cells of two rows and two seeds, and what they found, two at a time."""
    cells, watch = small_cells(tmp_path_factory.mktemp("ablation"), data), Watch()
    outcome = run_cells(cells, 2, board=watch)
    assert not outcome.failures
    assert set(watch.ended) == {cell.name for cell in cells}
    return cells, outcome.results


def test_one_at_a_time_and_in_this_process_find_the_same(finished, tmp_path, data):
    cells, results = finished
    assert [(r.row, r.seed) for r in results] == [(c.row.name, c.config.seed) for c in cells]
    assert run_cells(small_cells(tmp_path / "1", data), 1).results == results
    assert run_cell(small_cells(tmp_path / "2", data)[1]) == results[1]


def test_finished_cells_are_not_run_again(finished):
    cells, results = finished
    stamps = [(cell.directory / "checkpoint.pt").stat().st_mtime_ns for cell in cells]
    watch = Watch()
    assert run_cells(cells, 2, board=watch).results == results
    assert list(watch.ended.values()) == results
    assert stamps == [(c.directory / "checkpoint.pt").stat().st_mtime_ns for c in cells]


def test_cells_that_fail_are_named_and_the_others_go_on(tmp_path, data):
    rows = [AblationRow("far", "sasa@2", "none"), *ROWS]  # the grid is larger than its tables
    cells = small_cells(tmp_path, data, 1, rows)

    def kill(cell, fraction):
        if cell.row.name == "K":
            os.kill(int((cell.directory / ".lock").read_text().split()[1]), signal.SIGKILL)

    outcome = run_cells(cells, 2, board=Watch(kill))
    assert [result.row for result in outcome.results] == ["absolute"]
    far, killed = sorted(outcome.failures, key=lambda failure: failure.cell.row.name != "far")
    assert "far, seed 0 failed: UserError: grid 4x4 is larger than the tables" in str(far)
    assert "Traceback" in (far.cell.directory / "output.txt").read_text()
    assert "K, seed 0 failed: its process was ended by SIGKILL, perhaps for lack of" in str(killed)
    again = run_cells(cells[1:], 2)  # the one that was killed goes on from its checkpoint
    assert [result.row for result in again.results] == ["absolute", "K"]


def test_all_cells_stop_together_and_go_on_as_if_they_had_not(finished, tmp_path, data):
    cells = small_cells(tmp_path, data)
    asked = []

    def stop(cell, fraction):
        if not asked:  # a second time it would end at once
            asked.append(cell)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(StoppedError, match=r"stopped after . of 4 cells, all saved"):
        run_cells(cells, 2, board=Watch(stop))
    assert not (cells[3].directory / "result.json").exists()
    assert run_cells(cells, 2).results == finished[1]


PARENT = """
import sys
from pathlib import Path
from ablation.small import small_cells
from irpe.ablation.running import run_cells
if __name__ == "__main__":
    run_cells(small_cells(Path(sys.argv[1]), sys.argv[2], 1, epochs=5000), 2)
"""


def test_no_cell_outlives_its_parent(tmp_path, data):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    command = [sys.executable, str(script), str(tmp_path), data]
    parent = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    cells = small_cells(tmp_path, data, 1, epochs=5000)
    try:
        wait_for(lambda: all((cell.directory / "checkpoint.pt").exists() for cell in cells))
        children = [int((cell.directory / ".lock").read_text().split()[1]) for cell in cells]
        assert all(map(is_alive, children))
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not any(map(is_alive, children)))


def wait_for(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(process):
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().split(")")[-1].split()[0]
    except OSError:
        return False


def test_a_report_is_written(finished, tmp_path):
    cells, results = finished
    tasks = tasks_of_rows(cells, open_task(cells[0].config))
    rows = collect_rows(ROWS, results, measure_row_costs(tasks, rounds=1))
    report = AblationReport("Ablation", "laptop", rows, cells, {"images": "24"})
    report.write(tmp_path / "report")
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"report.md", "results.json", "top1.png", "curves.png"}
    content = json.loads((tmp_path / "report/results.json").read_text())
    assert [row["row"] for row in content["rows"]] == ["absolute", "K"]
    assert content["rows"][1]["parameters"] == rows[1].cost.parameters
    assert content["rows"][0]["effect"] is None
    text = (tmp_path / "report/report.md").read_text()
    assert markdown_table(rows) in text
    assert "](" not in text  # nothing that is lost when it is pasted elsewhere
