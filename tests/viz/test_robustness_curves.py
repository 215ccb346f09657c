"""The curves of robustness are the scores: means as lines, seeds as points."""

import pytest

pytest.importorskip("matplotlib", reason="needs the extra 'viz'")

from irpe.train import Measure
from irpe.viz import plot_robustness

BY_SIZE = {"absolute": {28: [70.0, 80.0], 20: [40.0, 44.0]}, "K": {28: [60.0], 20: [50.0]}}
BY_MOVE = {"absolute": {0: [70.0, 80.0], 1: [10.0, 30.0]}, "K": {0: [60.0], 1: [55.0]}}


def plot(by_size, by_move, trained, errors=None):
    curves, titles = {"size": by_size, "move": by_move}, {"size": "size", "move": "move"}
    measure = Measure("top1", "top-1", "%")
    return plot_robustness(curves, titles, measure, {"size": trained}, errors)


def lines(axes):
    return [(line.get_xdata(), line.get_ydata()) for line in axes.lines]


def test_curves_are_means_and_points_are_seeds():
    figure = plot(BY_SIZE, BY_MOVE, [28])
    left, right = figure.axes
    trained, *drawn = lines(left)
    assert list(trained[0]) == [28, 28]
    assert [[list(x), list(y)] for x, y in drawn] == [
        [[20, 28], [42.0, 75.0]],
        [[20, 20, 28, 28], [40.0, 44.0, 70.0, 80.0]],
        [[20, 28], [50.0, 60.0]],
        [[20, 28], [50.0, 60.0]],
    ]
    assert list(lines(right)[0][1]) == [75.0, 20.0]
    assert list(lines(right)[1][1]) == [70.0, 80.0, 10.0, 30.0]
    assert list(left.get_xticks()) == [20, 28]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["absolute", "K"]


def test_both_panels_have_the_same_scale_and_show_all_points():
    left, right = plot(BY_SIZE, BY_MOVE, [28]).axes
    assert left.get_ylim() == right.get_ylim()
    low, high = left.get_ylim()
    assert low < 10
    assert high > 80


def test_bars_are_two_standard_errors_over_the_images():
    errors = {
        name: {label: {at: [3.0] * len(x) for at, x in of.items()} for label, of in curves.items()}
        for name, curves in {"size": BY_SIZE, "move": BY_MOVE}.items()
    }
    _, right = plot(BY_SIZE, BY_MOVE, [28], errors).axes
    (low, high) = right.collections[0].get_segments()[1][:, 1]
    assert (low, high) == (pytest.approx(20 - 6), pytest.approx(20 + 6))


def test_sizes_that_are_not_square_lie_where_their_area_is():
    sizes = {"K": {(16, 64): [50.0], (28, 28): [60.0]}}
    (axes,) = plot_robustness({"s": sizes}, {"s": "size"}, Measure("top1", "top-1", "%")).axes
    assert [text.get_text() for text in axes.get_xticklabels()] == ["28", "16x64"]
    assert list(axes.lines[0].get_xdata()) == [28, 32]


def test_a_line_marks_each_size_of_training():
    left, _ = plot(BY_SIZE, BY_MOVE, [20, 28]).axes
    assert [list(x) for x, _ in lines(left)[:2]] == [[20, 20], [28, 28]]


@pytest.mark.parametrize("by_move", [{}, {"K": BY_MOVE["K"]}])
def test_both_panels_need_the_same_labels(by_move):
    with pytest.raises(ValueError, match="the same labels"):
        plot(BY_SIZE, by_move, [28])
