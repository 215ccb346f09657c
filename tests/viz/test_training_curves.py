"""The curves of training runs."""

import math

import pytest

from irpe.viz import plot_training

NAN = math.nan
CLASSIFIER = {
    "epoch": [1.0, 2.0],
    "train_loss": [2.0, 1.25],
    "val_loss": [1.5, 1.0],
    "top1": [40.5, 60.0],
}


def test_epochs_that_were_not_evaluated_leave_no_gap():
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    metrics = {
        "epoch": [1.0, 2.0, 3.0, 4.0],
        "train_loss": [2.0, 1.5, 1.2, 1.0],
        "val_loss": [NAN, 1.2, NAN, 1.1],
        "top1": [NAN, 50.0, NAN, 55.0],
    }
    accuracy, loss = plot_training({"a": metrics}).axes
    assert accuracy.lines[0].get_xydata().tolist() == [[2.0, 50.0], [4.0, 55.0]]
    assert [line.get_xdata().tolist() for line in loss.lines] == [[2.0, 4.0], [1.0, 2.0, 3.0, 4.0]]


def test_curves_are_the_metrics():
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    figure = plot_training({"a": CLASSIFIER, "b": {**CLASSIFIER, "top1": [50.0, 55.0]}})
    accuracy, loss = figure.axes
    drawn = {line.get_label(): line.get_ydata().tolist() for line in accuracy.lines}
    assert drawn == {"a, best 60.00 %": [40.5, 60.0], "b, best 55.00 %": [50.0, 55.0]}
    assert [line.get_ydata().tolist() for line in loss.lines] == [[1.5, 1.0], [2.0, 1.25]] * 2


def test_detectors_show_average_precision():
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    metrics = {
        "epoch": [1.0, 2.0, 3.0],
        "train_loss": [17.0, 12.0, 11.0],
        "AP": [NAN, 0.1, 0.2],
        "AP50": [NAN, 0.25, 0.5],
    }
    score, loss = plot_training({"a": metrics}).axes
    drawn = {line.get_label(): line.get_xydata().tolist() for line in score.lines}
    assert drawn["a, best AP 0.200"] == [[2.0, 0.1], [3.0, 0.2]]
    assert [[2.0, 0.25], [3.0, 0.5]] in drawn.values()
    assert [line.get_ydata().tolist() for line in loss.lines] == [[17.0, 12.0, 11.0]]
    assert all(line.get_marker() == "None" for line in score.lines)
    alone = {name: values[:2] for name, values in metrics.items()}
    score, loss = plot_training({"a": alone}).axes
    assert [line.get_marker() for line in (*score.lines, *loss.lines)] == ["o", "o", "None"]
    with pytest.raises(ValueError, match="draw them apart"):
        plot_training({"a": metrics, "b": CLASSIFIER})


def test_a_missing_column_is_named():
    with pytest.raises(ValueError, match="the table of a has no column 'val_loss'"):
        plot_training({"a": {"epoch": [1.0], "train_loss": [2.0], "top1": [3.0]}})
