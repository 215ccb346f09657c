"""Cells in processes: the same numbers however many, stopped together, failures named."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ablation.small import ROWS, small_cells, write_images

from irpe.ablation.cells import run_cell
from irpe.ablation.costs import configs_of_rows, measure_row_costs
from irpe.ablation.executors import Failure, LocalProcesses, remaining, run_cells
from irpe.ablation.report import AblationReport, markdown_table
from irpe.ablation.rows import AblationRow
from irpe.ablation.statistics import collect_rows
from irpe.ablation.worker import CellState
from irpe.tasks.classify.task import ClassificationTask
from irpe.train.processes import StoppedError

LONG = {"epochs": 60, "eval_every": 30}  # so that something can happen in the middle


class Watch:
    """Listens, and acts once on each cell that is in the middle of its training."""

    def __init__(self, act=lambda cell: None):
        self.ended, self.act, self.seen = {}, act, set()

    def __call__(self, event):
        if event.result is not None:
            self.ended[event.work] = event.result
            return
        assert 0 <= event.done <= event.total
        assert event.values.get("remaining", 0) >= 0
        if event.done and event.work not in self.seen:
            self.seen.add(event.work)
            self.act(event.work)


def run_locally(cells, jobs, listen=lambda event: None):
    with LocalProcesses(jobs) as processes:
        return run_cells(cells, processes, listen)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, data):
    """The cells of two rows and two seeds, and what they found, two at a time."""
    cells, watch = small_cells(tmp_path_factory.mktemp("ablation"), data), Watch()
    results = run_locally(cells, 2, watch)
    assert set(watch.ended) == {cell.name for cell in cells}
    return cells, results


def test_a_cell_finds_the_same_in_this_process(finished, tmp_path, data):
    cells, results = finished
    assert [(r.row, r.seed) for r in results] == [(c.row.name, c.config.seed) for c in cells]
    assert run_cell(small_cells(tmp_path, data)[1]) == results[1]


def test_finished_cells_are_not_run_again(finished):
    cells, results = finished
    stamps = [(cell.directory / "checkpoint.pt").stat().st_mtime_ns for cell in cells]
    watch = Watch()
    assert run_locally(cells, 2, watch) == results
    assert list(watch.ended.values()) == results
    assert stamps == [(c.directory / "checkpoint.pt").stat().st_mtime_ns for c in cells]


def test_cells_that_fail_are_named_and_the_others_go_on(tmp_path, data):
    rows = [AblationRow("far", "sasa@2", "none"), *ROWS]  # the grid is larger than its tables
    cells = small_cells(tmp_path, data, 1, rows, **LONG)

    def kill(name):
        if name == "K, seed 0":
            os.kill(int((cells[2].directory / ".lock").read_text().split()[1]), signal.SIGKILL)

    far, ended, killed = run_locally(cells, 2, Watch(kill))
    assert ended.row == "absolute"
    assert "far, seed 0 failed: UserError: grid 4x4 is larger than the tables" in str(far)
    assert "Traceback" in (far.cell.directory / "output.txt").read_text()
    assert "K, seed 0 failed: its process was ended by SIGKILL" in str(killed)
    again = run_locally(cells[1:], 2)  # the one that was killed goes on from its checkpoint
    assert [result.row for result in again] == ["absolute", "K"]


def test_all_cells_stop_together_and_go_on_as_if_they_had_not(tmp_path, data):
    cells = small_cells(tmp_path / "stopped", data, 1, **LONG)
    asked = []

    def stop(name):
        if not asked:  # a second time it would end at once
            asked.append(name)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(StoppedError, match=r"stopped after 0 of 2 cells, all saved"):
        run_locally(cells, 2, Watch(stop))
    whole = small_cells(tmp_path / "whole", data, 1, **LONG)
    assert run_locally(cells, 2) == [run_cell(cell) for cell in whole]


class Threads:
    """An executor as simple as can be: a thread for each cell, a few at a time."""

    def __init__(self, jobs):
        self.pool = ThreadPoolExecutor(jobs)

    def submit(self, work, cell):
        return self.pool.submit(work, cell)


def test_anything_with_submit_runs_cells_and_names_those_that_fail(finished, tmp_path, data):
    rows = [ROWS[0], AblationRow("far", "sasa@2", "none")]
    result, failure = run_cells(small_cells(tmp_path, data, 1, rows), Threads(2))
    assert result == finished[1][0]
    assert isinstance(failure, Failure)
    assert "UserError: grid 4x4 is larger than the tables" in failure.reason


def test_the_remaining_time_is_that_of_like_cells(tmp_path):
    cells = small_cells(tmp_path, "embedded")  # absolute, K, absolute, K
    assert remaining(cells, {}) is None
    states = {
        "absolute, seed 0": CellState(done=30, total=100, pace=1.0),
        "K, seed 0": CellState(done=10, total=100, pace=3.0),
    }
    assert remaining(cells, states) == pytest.approx((70 * 1 + 90 * 3 + 100 * 1 + 100 * 3) / 2)
    assert remaining(cells[3:], states) == pytest.approx(300)  # one cell has one job


PARENT = """
import sys
from pathlib import Path
from ablation.small import small_cells
from irpe.ablation.executors import LocalProcesses, run_cells
with LocalProcesses(2) as processes:
    run_cells(small_cells(Path(sys.argv[1]), sys.argv[2], 1, epochs=5000), processes)
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
    task = ClassificationTask(cells[0].config)
    task.open("train", None)
    costs = measure_row_costs(configs_of_rows(cells, task.config), task, rounds=1)
    rows = collect_rows(ROWS, results, costs)
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
