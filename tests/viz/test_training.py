"""The metrics of runs and their curves."""

import pytest

from irpe.viz import plot_training, read_metrics

HEADER = "epoch,lr,train_loss,val_loss,top1,top5,seconds\n"
LINES = "1,0.001,2.0,1.5,40.5,80,10\n2,0.0005,1.25,1.0,60,90,11\n"


def write(folder, text):
    folder.mkdir()
    (folder / "metrics.csv").write_text(text)
    return folder


def test_metrics_are_read_column_by_column(tmp_path):
    metrics = read_metrics(write(tmp_path / "run", HEADER + LINES))
    assert metrics["top1"] == [40.5, 60.0]
    assert metrics["train_loss"] == [2.0, 1.25]
    assert list(metrics) == HEADER.strip().split(",")


@pytest.mark.parametrize(
    "text",
    [
        "",
        HEADER,
        HEADER + "1,2\n",
        HEADER + "a,b,c,d,e,f,g\n",
        HEADER + ",0.1,2,1,1,1,1\n",
        HEADER + "1,0.1,,1,1,1,1\n",
        "\x00",
    ],
)
def test_damaged_metrics_are_an_error_that_names_the_file(tmp_path, text):
    with pytest.raises(ValueError, match=r"metrics\.csv is damaged or empty"):
        read_metrics(write(tmp_path / "run", text))


def test_a_missing_column_is_named(tmp_path):
    with pytest.raises(ValueError, match="has no column 'val_loss'"):
        read_metrics(write(tmp_path / "run", "epoch,train_loss,top1\n1,2,3\n"))


def test_a_folder_without_metrics_is_no_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"is no training run$"):
        read_metrics(tmp_path)
    write(tmp_path / "run", HEADER + LINES)
    with pytest.raises(FileNotFoundError, match=r"is no training run; it holds runs, pass .*/\*"):
        read_metrics(tmp_path)


def test_epochs_that_were_not_evaluated_leave_no_gap(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    lines = "1,0.1,2.0,,,,9\n2,0.1,1.5,1.2,50,80,9\n3,0.1,1.2,,,,9\n4,0.1,1.0,1.1,55,85,9\n"
    metrics = read_metrics(write(tmp_path / "run", HEADER + lines))
    accuracy, loss = plot_training({"a": metrics}).axes
    assert accuracy.lines[0].get_xydata().tolist() == [[2.0, 50.0], [4.0, 55.0]]
    assert [line.get_xdata().tolist() for line in loss.lines] == [[2.0, 4.0], [1.0, 2.0, 3.0, 4.0]]


def test_curves_are_the_metrics(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    metrics = read_metrics(write(tmp_path / "run", HEADER + LINES))
    figure = plot_training({"a": metrics, "b": {**metrics, "top1": [50.0, 55.0]}})
    accuracy, loss = figure.axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in accuracy.lines}
    assert drawn == {"a, best 60.00 %": [40.5, 60.0], "b, best 55.00 %": [50.0, 55.0]}
    assert [line.get_ydata().tolist() for line in loss.lines] == [[1.5, 1.0], [2.0, 1.25]] * 2


def test_detectors_show_average_precision(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    lines = "1,17.0,,\n2,12.0,0.1,0.25\n3,11.0,0.2,0.5\n"
    metrics = read_metrics(write(tmp_path / "run", "epoch,train_loss,AP,AP50\n" + lines))
    score, loss = plot_training({"a": metrics}).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in score.lines}
    assert drawn["a, best AP 0.200"] == [[2.0, 0.1], [3.0, 0.2]]
    assert [[2.0, 0.25], [3.0, 0.5]] in drawn.values()
    assert [line.get_ydata().tolist() for line in loss.lines] == [[17.0, 12.0, 11.0]]
    assert all(line.get_marker() == "None" for line in score.lines)
    alone = {name: values[:2] for name, values in metrics.items()}
    score, loss = plot_training({"a": alone}).axes
    assert [line.get_marker() for line in (*score.lines, *loss.lines)] == ["o", "o", "None"]
    classifier = read_metrics(write(tmp_path / "other", HEADER + LINES))
    with pytest.raises(ValueError, match="draw them apart"):
        plot_training({"a": metrics, "b": classifier})
