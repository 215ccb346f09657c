"""mIoU of segmenters on images of other sizes than in training."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from irpe.errors import UserError
from irpe.viz.canvas import COLOURS, COLUMN, new_figure, panels, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = "osD^v<>P"
_COLUMNS = 4  # of the legend

SizeCurves = Mapping[str, Mapping[float, Sequence[float]]]


@styled
def plot_sizes(whole: SizeCurves, sliding: SizeCurves) -> "Figure":
    """Returns two panels of curves: the mean of the seeds as a line, each seed as a point.

    Args:
        whole: mIoU of whole images in percent, by label, then by how much larger than in training
            images are, then by seed.
        sliding: The same of sliding windows.

    Examples:
        >>> import irpe.viz
        >>> whole = {"K": {1.0: [25.2, 24.9], 2.0: [20.1, 21.0]}}
        >>> figure = irpe.viz.plot_sizes(whole, sliding=whole)
    """
    if not whole or list(whole) != list(sliding):
        raise UserError(
            f"labels of whole images {', '.join(whole) or 'none'}; of sliding windows "
            f"{', '.join(sliding) or 'none'}: both need the same, one at least"
        )
    figure = new_figure(2 * COLUMN, 5.8 + 0.4 * -(-len(whole) // _COLUMNS))
    ((left, right),) = panels(figure, 1, 2)
    handles = _draw(left, whole)
    _draw(right, sliding)
    left.set(title="whole images", ylabel="mIoU, in %")
    right.set(title="sliding windows")
    for axes in (left, right):
        axes.set_xlabel("size of an image, relative to training")
    right.sharey(left)
    left.autoscale(axis="y")
    columns = min(len(whole), _COLUMNS)
    figure.legend(handles, list(whole), loc="outside lower center", ncols=columns)
    return figure


def _draw(axes: "Axes", curves: SizeCurves) -> list[Any]:
    """Draws the curves, and returns what the legend shows of each: its line and its points."""
    handles: list[Any] = []
    for index, (label, scores) in enumerate(curves.items()):
        colour, mark = COLOURS[index % len(COLOURS)], _MARKS[index % len(_MARKS)]
        scales = sorted(scores)
        means = [statistics.mean(scores[scale]) for scale in scales]
        (line,) = axes.plot(scales, means, color=colour, label=label)
        points = [(scale, score) for scale in scales for score in scores[scale]]
        columns = zip(*points, strict=True)
        (seeds,) = axes.plot(*columns, mark, color=colour, markersize=3.5, alpha=0.7, mew=0)
        handles.append((line, seeds))
    axes.set_xticks(sorted({scale for scores in curves.values() for scale in scores}))
    axes.grid(axis="y")
    return handles
