"""`ablate` and its report as data, with an executor that runs cells in this process."""

import json
import shutil
from concurrent.futures import Future
from dataclasses import replace

import pytest
from ablation.small import ENCODED, ROWS, write_images
from train.little import CONFIG

from irpe.ablation import Ablation, AblationRow, ablate, read_report
from irpe.ablation.cells import run_cell
from irpe.cli.main import understand
from irpe.errors import UserError

pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
from matplotlib.text import Text


class Here:
    """An executor of this process; it counts what it runs."""

    def __init__(self):
        self.count = 0

    def submit(self, work, cell):
        self.count += 1
        future = Future()
        future.set_result(run_cell(cell))
        return future


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return CONFIG.replace(**ENCODED, data=write_images(tmp_path_factory.mktemp("data")))


@pytest.fixture(scope="module")
def ended(tmp_path_factory, base):
    """An ablation of two rows and two seeds, its report, and what it said on the way."""
    ablation, said = Ablation(ROWS, base, tmp_path_factory.mktemp("ended"), 2), []
    executor = Here()
    report = ablate(ablation, executor, listen=said.append)
    assert executor.count == 4
    return ablation, report, said


def test_it_says_what_will_run_and_what_came_of_it(ended):
    ablation, report, said = ended
    facts = next(event.result for event in said if event.work == "facts")
    assert facts["rows"] == "absolute, K"
    assert facts["augmentation"] == "mirrored with probability 0.5"
    assert facts["device"] == "Here"
    assert facts["output"] == str(ablation.folder)
    assert f"- augmentation: {facts['augmentation']}" in report.as_markdown()
    results = [event.result for event in said if event.work.startswith("K, seed")]
    assert [result.row for result in results] == ["K", "K"]


def test_finished_cells_are_not_run_again_and_more_seeds_continue(ended):
    ablation, report, _ = ended
    executor = Here()
    assert ablate(ablation, executor).as_json() == report.as_json()
    assert executor.count == 0
    more = ablate(replace(ablation, seeds=3), executor)
    assert executor.count == 2
    assert [len(row.results) for row in more.rows] == [3, 3]
    ablate(ablation, executor)


def test_a_report_is_data(ended):
    _, report, _ = ended
    table = report.table()
    assert len(table) == 2 * 2 * 3  # rows, seeds, shifts
    values = [value for row in table for value in row.values()]
    assert all(isinstance(value, str | int | float | None) for value in values)
    first = report.rows[0].results[0]
    assert table[0]["top1"] == first.score().value
    assert table[0]["processor"] == first.machine["processor"]
    found = report.compare("K", "absolute")
    means = [sum(row["top1"] for row in table if row["row"] == name and not row["shift"]) / 2
             for name in ("K", "absolute")]  # fmt: skip
    assert found.value == pytest.approx(means[0] - means[1])
    assert found.low < found.value < found.high
    with pytest.raises(UserError, match="row 'V' is not one of absolute, K"):
        report.compare("V", "K")


def test_results_hold_what_became_of_each_image(ended):
    _, report, _ = ended
    (_, _), (row, _) = (row["seeds"] for row in report.as_json()["rows"])
    for shift, (top1, images) in enumerate(zip(row["top1"], row["images"], strict=True)):
        assert len(images) == 20
        assert top1 == pytest.approx(100 * images.count("1") / 20)
        values = report.rows[1].results[0].score(shift).values
        assert [100.0 * int(each) for each in images] == list(values)


def test_a_report_shows_itself_in_a_notebook(ended):
    _, report, _ = ended
    texts = {text.get_text() for text in report.figure().findobj(Text)}
    assert {"absolute", "K"} <= texts
    shown = report._repr_html_()
    assert shown.count("<tr>") == 3
    assert 'src="data:image/png;base64,' in shown
    assert report.answer().headline in shown


def test_a_folder_is_read_again_without_training(ended, capsys):
    ablation, report, _ = ended
    assert read_report(str(ablation.folder)).as_json() == report.as_json()
    stamps = {path: path.stat().st_mtime_ns for path in ablation.folder.rglob("*.*")}
    command, given = understand(["ablate", str(ablation.folder)])
    command(**given)
    assert report.answer().headline in " ".join(capsys.readouterr().out.split())
    assert stamps == {path: path.stat().st_mtime_ns for path in ablation.folder.rglob("*.*")}


def test_a_folder_is_read_while_its_cells_run(ended, tmp_path):
    with pytest.raises(UserError, match="not the folder of an ablation"):
        read_report(tmp_path)
    ablation, *_ = ended
    folder = tmp_path / "copy"
    shutil.copytree(ablation.folder, folder)
    (last,) = folder.glob("cells/K-1-*/result.json")
    last.unlink()
    report = read_report(folder)
    assert [len(row.results) for row in report.rows] == [2, 1]
    assert report.failures == ["1 of 4 cells have not ended yet."]


def test_folders_of_the_same_settings_are_read_together(ended, tmp_path, base):
    ablation, _, _ = ended
    bias = AblationRow("bias", "product-bias-k", "none")
    other = Ablation([ROWS[0], bias], base, tmp_path / "other", 1)
    ablate(other, Here())
    both = read_report(ablation.folder, other.folder)
    assert [(row.name, len(row.results)) for row in both.rows] == [
        ("absolute", 2), ("K", 2), ("bias", 1),
    ]  # fmt: skip
    claim = json.loads((other.folder / "ablation.json").read_text())
    for change, words in (
        ({"epochs": 1}, "differ in epochs"),
        ({"rows": [["K", "product-bias-k", "none"]]}, "rename one"),
    ):
        (other.folder / "ablation.json").write_text(json.dumps({**claim, **change}))
        with pytest.raises(UserError, match=words):
            read_report(ablation.folder, other.folder)
