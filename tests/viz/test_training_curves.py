"""The curves of training runs."""

import math

import pytest

from irpe.train import Measure
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


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_curves_are_the_metrics():
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    figure = plot_training({"a": CLASSIFIER, "b": {**CLASSIFIER, "top1": [50.0, 55.0]}})
    accuracy, loss = figure.axes
    assert [line.get_ydata().tolist() for line in accuracy.lines] == [[40.5, 60.0], [50.0, 55.0]]
    assert legend(figure) == ["a: 60.00", "b: 55.00"]
    assert [line.get_ydata().tolist() for line in loss.lines] == [[1.5, 1.0], [2.0, 1.25]] * 2


def test_seeds_have_one_colour_and_one_entry():
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    other = {**CLASSIFIER, "top1": [50.0, 55.0]}
    figure = plot_training({"a": [CLASSIFIER, other], "b": [other]})
    colours = [line.get_color() for line in figure.axes[0].lines]
    assert colours[0] == colours[1] != colours[2]
    assert legend(figure) == ["a: 60.00, 55.00", "b: 55.00"]


@pytest.mark.parametrize("count", [12, 40])
def test_a_legend_of_many_runs_is_smaller_than_the_plot(count):
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    names = {f"a long name of a run {n}": {**CLASSIFIER, "top1": [1.0, n]} for n in range(count)}
    figure = plot_training(names)
    figure.canvas.draw()
    plots = sum(axes.get_window_extent().height for axes in figure.axes)
    assert figure.legends[0].get_window_extent().height < plots / 2
    named = [int(text.split(":")[0].split()[-1]) for text in legend(figure)]
    assert named == list(range(max(0, count - 16), count))  # those with the best scores


def test_another_score_is_drawn_by_its_measure():
    pytest.importorskip("matplotlib", reason="needs the extra 'viz'")
    metrics = {"epoch": [1.0, 2.0, 3.0], "train_loss": [17.0, 12.0, 11.0], "AP": [NAN, 0.1, 0.2]}
    score, loss = plot_training({"a": metrics}).axes
    assert [line.get_xydata().tolist() for line in score.lines] == [[[2.0, 0.1], [3.0, 0.2]]]
    assert [line.get_ydata().tolist() for line in loss.lines] == [[17.0, 12.0, 11.0]]
    assert all(line.get_marker() == "None" for line in score.lines)
    error = Measure("AP", "error", "%", higher_is_better=False, digits=3)
    figure = plot_training({"a": metrics}, error)
    assert legend(figure) == ["a: 0.100"]
    assert "error" in figure.axes[0].get_ylabel()
    alone = {name: values[:2] for name, values in metrics.items()}
    score, loss = plot_training({"a": alone}).axes
    assert [line.get_marker() for line in (*score.lines, *loss.lines)] == ["o", "None"]
    with pytest.raises(ValueError, match="the table of b has no column 'AP'"):
        plot_training({"a": metrics, "b": CLASSIFIER})


def test_a_table_without_a_score_is_refused():
    with pytest.raises(ValueError, match="have no score beside epoch, train_loss"):
        plot_training({"a": {"epoch": [1.0], "train_loss": [2.0]}})
