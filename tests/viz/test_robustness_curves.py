"""The curves of robustness are the scores: means as lines, seeds as points."""

import pytest

pytest.importorskip("matplotlib", reason="needs the extra 'viz'")

from irpe.viz import plot_robustness

BY_SIZE = {"absolute": {28: [70.0, 80.0], 20: [40.0, 44.0]}, "K": {28: [60.0], 20: [50.0]}}
BY_MOVE = {"absolute": {0: [70.0, 80.0], 1: [10.0, 30.0]}, "K": {0: [60.0], 1: [55.0]}}


def lines(axes):
    return [(line.get_xdata(), line.get_ydata()) for line in axes.lines]


def test_curves_are_means_and_points_are_seeds():
    figure = plot_robustness(BY_SIZE, BY_MOVE, [28], 400)
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
    left, right = plot_robustness(BY_SIZE, BY_MOVE, [28], 400).axes
    assert left.get_ylim() == right.get_ylim()
    low, high = left.get_ylim()
    assert low < 10
    assert high > 80


def test_bars_are_two_standard_errors_over_the_images():
    _, right = plot_robustness(BY_SIZE, BY_MOVE, [28], 400).axes
    (low, high) = right.collections[0].get_segments()[1][:, 1]
    assert (high + low) / 2 == pytest.approx(20)
    assert (high - low) / 2 == pytest.approx(2 * (20 * 80 / 400) ** 0.5)


def test_a_line_marks_each_size_of_training():
    left, _ = plot_robustness(BY_SIZE, BY_MOVE, [28, 20, 28], 400).axes
    assert [list(x) for x, _ in lines(left)[:2]] == [[20, 20], [28, 28]]


@pytest.mark.parametrize("by_move", [{}, {"K": BY_MOVE["K"]}])
def test_both_panels_need_the_same_labels(by_move):
    with pytest.raises(ValueError, match="both need the same"):
        plot_robustness(BY_SIZE, by_move, [28], 400)
