"""Accuracy on images unlike those of training: by their size, and by how far they are shifted."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from irpe.errors import UserError
from irpe.viz.canvas import COLOURS, COLUMN, new_figure, panels, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = "osD^v<>P"
_DASHES = ("-", "--", ":", "-.")
_COLUMNS = 4  # of the legend

Curves = Mapping[str, Mapping[int, Sequence[float]]]


@styled
def plot_robustness(
    by_size: Curves, by_move: Curves, trained: Collection[int], num_images: int
) -> "Figure":
    """Returns two panels of curves: the mean of the seeds as a line, each seed as a point.

    A bar around the mean is twice the standard error over the images, both ways.

    Args:
        by_size: Top-1 in percent, by label, then by the size of the input, then by seed.
        by_move: Top-1 in percent, by label, then by the patches that images moved, then by seed.
        trained: The sizes that the models were trained at.
        num_images: How many images each score is of.

    Examples:
        >>> import irpe.viz
        >>> by_size = {"K": {48: [70.1, 71.0], 64: [75.0, 76.2]}}
        >>> by_move = {"K": {0: [75.0, 76.2], 1: [60.4, 61.3]}}
        >>> figure = irpe.viz.plot_robustness(by_size, by_move, trained=[64], num_images=1000)
    """
    if not by_size or list(by_size) != list(by_move):
        raise UserError(
            f"labels by size {', '.join(by_size) or 'none'}; by move {', '.join(by_move) or 'none'}"
            ": both need the same, one at least"
        )
    rows = -(-len(by_size) // _COLUMNS)
    figure = new_figure(2 * COLUMN, 5.8 + 0.4 * rows)
    ((left, right),) = panels(figure, 1, 2)
    for size in sorted(set(trained)):
        left.axvline(size, color="#999999", linestyle=":", linewidth=0.8, zorder=0)
    handles = _draw(left, by_size, num_images)
    _draw(right, by_move, num_images)
    left.set(xlabel="side of the input, in pixels (dotted: in training)", ylabel="top-1, in %")
    right.set(xlabel="images moved by, in patches")
    right.sharey(left)
    left.autoscale(axis="y")
    columns = min(len(by_size), _COLUMNS)
    figure.legend(handles, list(by_size), loc="outside lower center", ncols=columns)
    return figure


def _draw(axes: "Axes", curves: Curves, num_images: int) -> list[Any]:
    """Draws the curves, and returns what the legend shows of each: its line and its points."""
    handles: list[Any] = []
    for index, (label, scores) in enumerate(curves.items()):
        colour, mark = COLOURS[index % len(COLOURS)], _MARKS[index % len(_MARKS)]
        dashes = _DASHES[index // len(COLOURS) % len(_DASHES)]
        conditions = sorted(scores)
        means = [statistics.mean(scores[condition]) for condition in conditions]
        (line,) = axes.plot(conditions, means, dashes, color=colour, label=label)
        bars = [2 * math.sqrt(mean * (100 - mean) / num_images) for mean in means]
        axes.errorbar(conditions, means, bars, fmt="none", ecolor=colour, elinewidth=0.8)
        points = [(condition, score) for condition in conditions for score in scores[condition]]
        (seeds,) = axes.plot(
            *zip(*points, strict=True), mark, color=colour, markersize=3.5, alpha=0.7, mew=0
        )
        handles.append((line, seeds))
    axes.set_xticks(sorted({condition for scores in curves.values() for condition in scores}))
    axes.grid(axis="y")
    return handles
