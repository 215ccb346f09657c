"""Rates are searched on held-out training images alone, and the best of each row is taken."""

from dataclasses import replace

import pytest
from ablation.small import ENCODED, ROWS, cell_result, small_cells, write_images
from train import streets
from train.little import CONFIG
from train.streets import make_streets

from irpe.ablation.answer import answer
from irpe.ablation.cells import read_result, run_cell, task_of
from irpe.ablation.costs import RowCost
from irpe.ablation.report import AblationReport
from irpe.ablation.rows import AblationRow, modern_rows
from irpe.ablation.statistics import collect_rows
from irpe.ablation.tuning import (
    FACTORS,
    HELD_OUT,
    SEEDS,
    Search,
    choose_rates,
    collect_searches,
    plan_searches,
    plan_trials,
    tuning_table,
)
from irpe.train.evaluation import evaluate
from irpe.train.run import load_run
from irpe.train.task import AS_TRAINED

BASE = CONFIG.replace(**ENCODED)
ABSOLUTE, K = Search(ROWS[0], "absolute_lr"), Search(ROWS[1], "table_lr")


def trials(search, correct):
    """Trials that classify so many of 10 images correctly, by factor and seed."""
    rows = search.candidates()
    return [
        cell_result(rows[factor].name, seed, count, count, count, images=10)
        for factor, counts in correct.items()
        for seed, count in enumerate(counts)
    ]


def test_only_rows_that_learn_positions_are_searched():
    searched = {each.row.name: each.field for each in plan_searches(modern_rows(4), BASE)}
    assert "none" not in searched
    assert "rope-axial" not in searched
    assert searched.pop("absolute") == "absolute_lr"
    assert set(searched.values()) == {"table_lr"}
    assert {"rope-mixed", "log-cpb", "rope-axial + K", "absolute + QKV"} < searched.keys()
    nothing = [AblationRow("set", "none", "none"), AblationRow("turned", "rope-axial", "none")]
    with pytest.raises(ValueError, match="none of the rows set, turned has tables or a learned"):
        plan_searches(nothing, BASE)


def test_a_trial_is_a_cell_with_a_rate_of_its_own_in_another_folder(tmp_path):
    found = plan_trials([ABSOLUTE, K], BASE, tmp_path)
    assert len(found) == 2 * SEEDS * len(FACTORS)
    assert [cell.config.absolute_lr for cell in found[:3]] == list(FACTORS)
    assert [cell.config.table_lr for cell in found[3:6]] == list(FACTORS)
    same = AblationRow("K", "product-contextual-k", "none", {"table_lr": FACTORS[1]})
    cell = small_cells(tmp_path, BASE.data, 1, [same])[0]
    assert cell.config == found[4].config
    assert cell.directory not in {trial.directory for trial in found}


def test_a_trial_reads_no_test_image(tmp_path):
    data = write_images(tmp_path / "data")
    for path in (tmp_path / "data/val").rglob("*.png"):
        path.write_text("not an image")
    cell = plan_trials([K], BASE.replace(data=data), tmp_path)[0]
    result = run_cell(cell)
    assert read_result(cell) == result
    task = task_of(cell)
    train, held_out = task.open("train", None), task.open("val", AS_TRAINED)
    assert not {*train.indices} & {*held_out.indices}
    assert len(held_out) == len(result.score().values) == 24 * HELD_OUT // 1 + 1
    (again,) = evaluate((task, load_run(cell.directory)))
    assert again.score.value == pytest.approx(result.score().value)


def test_the_best_factor_of_each_row_is_taken():
    results = trials(ABSOLUTE, {1.0: (5, 6), 5.0: (9, 2), 20.0: (4, 4)})
    results += trials(K, {1.0: (1, 2), 5.0: (8, 7), 20.0: (9,)})  # one seed failed
    found = collect_searches([ABSOLUTE, K], results)
    assert [result.chosen for result in found] == [1.0, 5.0]
    other = AblationRow("turned", "rope-axial", "none")
    rows = choose_rates([other, *ROWS], found)
    assert [row.rates for row in rows] == [{}, {"absolute_lr": 1.0}, {"table_lr": 5.0}]
    assert [row.name for row in rows] == ["turned", "absolute", "K"]
    table = tuning_table(found).splitlines()
    assert table[3] == (
        "| K (tables) | 15.0 / 15.0 / 15.0 | 75.0 / 75.0 / 75.0 | 90.0 / 90.0 / 90.0 | x5 |"
    )


def test_a_row_whose_trials_failed_has_the_rate_of_the_recipe():
    found = collect_searches([K], [])
    assert choose_rates(ROWS, found) == ROWS
    assert tuning_table(found).endswith("| K (tables) |  |  |  | as in the recipe |")


def test_the_report_says_what_was_tried(tmp_path):
    searches = collect_searches([K], trials(K, {1.0: (1, 2), 5.0: (8, 7), 20.0: (3, 3)}))
    rows = choose_rates(ROWS, searches)
    cells = small_cells(tmp_path, BASE.data, 2, rows)
    results = [cell_result(cell.row.name, cell.config.seed, 40, 40, 40) for cell in cells]
    found = collect_rows(rows, results, {row.name: RowCost(1, 1, 1.0) for row in rows})
    report = AblationReport("Ablation", "laptop", found, cells, {}, (), searches)
    content = report.as_json()
    assert content["settings"]["table_lr"] == "by row"
    assert [row["rates"] for row in content["rows"]] == [{}, {"table_lr": 5.0}]
    search = content["search"][0]
    assert (search["row"], search["rate"], search["chosen"]) == ("K", "table_lr", 5.0)
    assert search["tried"][2] == {"factor": 5.0, "seed": 0, "top1": [80.0, 80.0, 80.0]}
    assert any("searched on held-out training images: K 5." in line for line in report.lines())
    assert tuning_table(searches) in report.as_markdown()
    ahead = [
        replace(row, results=tuple(cell_result(row.name, seed, count) for seed in range(2)))
        for row, count in zip(found, (0, 100), strict=True)
    ]
    assert answer(ahead, "laptop", "cats").next_command.endswith("--absolute none --table-lr 5")


def test_rates_of_segmenters_are_searched_on_held_out_training_images(tmp_path):
    data = make_streets(tmp_path / "streets", count=6)
    for path in (data / "labels/val").iterdir():
        path.write_text("not a label map")
    base = streets.CONFIG.replace(**ENCODED, data=str(data), epochs=1)
    searched = {each.row.name: each.field for each in plan_searches(ROWS, base)}
    assert searched == {"absolute": "absolute_lr", "K": "table_lr"}
    cell = plan_trials([K], base, tmp_path)[0]
    result = run_cell(cell)
    assert read_result(cell) == result
    assert len(result.score().values) == 2
    tried = [replace(result, row=row.name) for row in K.candidates().values()]
    table = tuning_table(collect_searches([K], tried))
    assert f"| {result.score().value:.1f} |" in table
