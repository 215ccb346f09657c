"""The runs of an ablation: planned, run once, found again."""

import pytest
from ablation.small import ROWS, small_cells, write_images

from irpe.ablation.cells import plan_cells, read_result, run_cell
from irpe.ablation.shifts import classify_shifted
from irpe.tasks.classify.task import open_task
from irpe.train.processes import make_accelerator
from irpe.train.runs import load_run


def test_cells_have_a_directory_for_each_configuration(tmp_path):
    cells = small_cells(tmp_path, "embedded") + small_cells(tmp_path, "embedded", epochs=3)
    assert len({cell.directory for cell in cells}) == 8
    assert [cell.config.seed for cell in cells[:4]] == [0, 0, 1, 1]
    again = small_cells(tmp_path, "embedded")
    assert [c.directory for c in again] == [c.directory for c in cells[:4]]


def test_two_rows_of_one_name_are_refused(tmp_path):
    base = small_cells(tmp_path, "embedded")[0].config
    with pytest.raises(ValueError, match="two have the same name"):
        plan_cells([ROWS[0], ROWS[0]], base, 1, tmp_path)
    with pytest.raises(ValueError, match="seeds = 0 must be at least 1"):
        plan_cells(ROWS, base, 0, tmp_path)


def test_a_cell_finds_what_an_evaluation_of_its_run_finds(tmp_path):
    cell = small_cells(tmp_path, write_images(tmp_path / "data"), 1)[1]
    assert read_result(cell) is None
    result = run_cell(cell)
    assert read_result(cell) == result
    task, accelerator = open_task(cell.config), make_accelerator()
    model = load_run(cell.directory)
    score = task.evaluate(model, accelerator)
    shifted = classify_shifted(model, task.val_images, result.shifts, accelerator)
    assert result.shifts == (0, 1, 2)
    found = [tuple(value == 100 for value in each.values) for each in result.scores]
    assert found == shifted
    assert result.score().details["top5"] == score.top5
    assert result.score().value == pytest.approx(score.top1)
    labels = [task.val.read(index)[1] for index in range(len(task.val))]
    most = 100 * max(map(labels.count, labels)) / len(labels)
    assert {each.chance for each in result.scores} == {most}
    assert 0 < result.effect < 1
    assert result.seconds > 0
    (cell.directory / "result.json").unlink()
    again = run_cell(cell)  # evaluated, not trained again
    assert again == result
    assert again.seconds is None


def test_a_result_of_an_older_release_is_found_again(tmp_path):
    cell = small_cells(tmp_path, "embedded")[0]
    cell.directory.mkdir(parents=True)
    (cell.directory / "result.json").write_text('{"row": "absolute", "seed": 0, "correct": [[1]]}')
    assert read_result(cell) is None


def test_a_damaged_result_is_named(tmp_path):
    cell = small_cells(tmp_path, "embedded")[0]
    cell.directory.mkdir(parents=True)
    (cell.directory / "result.json").write_text("{")
    with pytest.raises(ValueError, match=r"result.json is damaged.*remove"):
        read_result(cell)
