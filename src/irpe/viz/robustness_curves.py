"""Scores on images unlike those of training: by their size, and by how far they are shifted."""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from irpe.core.colours import COLOURS
from irpe.errors import UserError
from irpe.train.task import Measure
from irpe.viz.canvas import COLUMN, new_figure, panels, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MARKS = "osD^v<>P"
_DASHES = ("-", "--", ":", "-.")
_COLUMNS = 4  # of the legend

At = float | tuple[int, int]
Curves = Mapping[str, Mapping[At, Sequence[float]]]


@styled
def plot_robustness(
    curves: Mapping[str, Curves],
    titles: Mapping[str, str],
    measure: Measure,
    trained: Mapping[str, Collection[At]] | None = None,
    errors: Mapping[str, Curves] | None = None,
) -> "Figure":
    """Returns a panel for each condition: the mean of the seeds as a line, each seed as a point.

    A bar around the mean is twice the standard error over the images, both ways.

    Args:
        curves: The scores by what changed, then by label, by how much (a number, or rows and
            columns), and by seed.
        titles: What each condition is called.
        measure: What the scores are.
        trained: What the models were trained at, by what changed; dotted.
        errors: The standard error of each score over the images, where it is known.

    Examples:
        >>> import irpe.viz
        >>> from irpe.train import Measure
        >>> sizes = {"K": {(48, 48): [70.1, 71.0], (48, 96): [75.0, 76.2]}}
        >>> measure = Measure("top1", "top-1", "%")
        >>> figure = irpe.viz.plot_robustness({"size": sizes}, {"size": "size"}, measure)
    """
    labels = list(next(iter(curves.values()), ()))
    if not labels or any(list(of_panel) != labels for of_panel in curves.values()):
        raise UserError("every panel needs curves of the same labels, one at least")
    figure = new_figure(len(curves) * COLUMN, 5.8 + 0.4 * -(-len(labels) // _COLUMNS))
    (drawn,) = panels(figure, 1, len(curves))
    handles: list[Any] = []
    for axes, (name, of_panel) in zip(drawn, curves.items(), strict=True):
        for at in (trained or {}).get(name, ()):
            axes.axvline(_place(at), color="#999999", linestyle=":", linewidth=0.8, zorder=0)
        handles = _draw(axes, of_panel, (errors or {}).get(name))
        axes.set_xlabel(titles[name])
        if axes is not drawn[0]:
            axes.sharey(drawn[0])
    drawn[0].set_ylabel(f"{measure.name}{', in %' if measure.unit == '%' else ''}")
    drawn[0].autoscale(axis="y")
    columns = min(len(labels), _COLUMNS)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def _draw(axes: "Axes", curves: Curves, errors: Curves | None) -> list[Any]:
    """Draws the curves, and returns what the legend shows of each: its line and its points."""
    handles: list[Any] = []
    for index, (label, scores) in enumerate(curves.items()):
        colour, mark = COLOURS[index % len(COLOURS)], _MARKS[index % len(_MARKS)]
        dashes = _DASHES[index // len(COLOURS) % len(_DASHES)]
        conditions = sorted(scores, key=_place)
        places = [_place(each) for each in conditions]
        means = [statistics.mean(scores[condition]) for condition in conditions]
        (line,) = axes.plot(places, means, dashes, color=colour, label=label)
        if errors is not None:
            bars = [2 * statistics.mean(errors[label][each]) for each in conditions]
            axes.errorbar(places, means, bars, fmt="none", ecolor=colour, elinewidth=0.8)
        points = [(_place(each), score) for each in conditions for score in scores[each]]
        style: dict[str, Any] = {"color": colour, "markersize": 3.5, "alpha": 0.7, "mew": 0}
        (seeds,) = axes.plot(*zip(*points, strict=True), mark, **style)
        handles.append((line, seeds))
    ticks = sorted({at for scores in curves.values() for at in scores}, key=_place)
    axes.set_xticks([_place(at) for at in ticks], [_text(at) for at in ticks])
    axes.grid(axis="y")
    return handles


def _place(at: At) -> float:
    """Returns where a condition is on the axis: the root of the area, for rows and columns."""
    return math.sqrt(at[0] * at[1]) if isinstance(at, tuple) else at


def _text(at: At) -> str:
    if isinstance(at, tuple):
        return f"{at[0]}" if at[0] == at[1] else f"{at[0]}x{at[1]}"
    return f"{at:g}"
