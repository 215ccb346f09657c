"""The runs of an ablation: planned, run once, found again."""

from dataclasses import replace

import pytest
from ablation.small import ROWS, small_cells, write_images

from irpe.ablation.cells import plan_cells, read_result, run_cell
from irpe.train.evaluation import evaluate
from irpe.train.run import Run
from irpe.train.task import Condition


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
    assert result.shifts == (0, 1, 2)
    conditions = [Condition(shift=shift) for shift in result.shifts]
    found = [each.score for each in evaluate(Run(cell.directory), conditions)]
    assert list(result.scores) == [replace(score, files={}) for score in found]
    assert 0 < result.effect < 1
    assert result.seconds > 0
    (cell.directory / "result.json").unlink()
    again = run_cell(cell)  # evaluated, not trained again
    assert again == result
    assert again.seconds is None


def test_a_cell_that_has_ended_is_evaluated_at_other_sizes(tmp_path):
    cell = small_cells(tmp_path, write_images(tmp_path / "data"), 1)[1]
    first = run_cell(cell)
    side = cell.config.image_size
    sized = replace(cell, sizes=((side, side), (side // 2, side)))
    assert read_result(sized) is None
    found = run_cell(sized)  # not trained again
    assert found.scores == first.scores
    assert found.score(f"{side}x{side}") == first.score()
    condition = Condition(size=(side // 2, side))
    (expected,) = evaluate(Run(cell.directory), [condition])
    assert found.score(f"{side // 2}x{side}").values == expected.score.values
    assert read_result(sized) == found


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
