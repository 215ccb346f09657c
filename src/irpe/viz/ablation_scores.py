"""The scores of an ablation: a point for each row, seed and distance."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from irpe.core.colours import COLOURS
from irpe.viz.canvas import COLUMN, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKS = "osD"


@styled
def plot_scores(
    scores: Mapping[str, Sequence[Sequence[float]]],
    errors: Mapping[str, Sequence[float]],
    score: str = "top-1",
) -> "Figure":
    """Returns a figure with a point for each row, seed and distance that images were moved.

    A bar around the mean of the seeds is twice the standard error over the test images, both ways.

    Args:
        scores: In percent, by row, then by the patches that images were moved, then by seed.
        errors: The standard error of the mean, by row, then by the patches.
        score: What the scores are called.

    Examples:
        >>> import irpe.viz
        >>> scores = {"K": [[75.3, 76.0], [55.9, 57.2], [35.6, 37.0]]}  # moved by 0, 1, 2
        >>> figure = irpe.viz.plot_scores(scores, errors={"K": [0.8, 0.9, 0.9]})
    """
    names = list(scores)
    figure = new_figure(1.5 * COLUMN, 1.8 + 0.6 * len(names))
    axes = figure.subplots()
    distances = len(scores[names[0]])
    for moved, mark in enumerate(_MARKS[:distances]):
        points = [(value, n) for n, name in enumerate(names) for value in scores[name][moved]]
        means = [statistics.mean(scores[name][moved]) for name in names]
        axes.errorbar(
            means,
            range(len(names)),
            xerr=[2 * errors[name][moved] for name in names],
            fmt="none",
            ecolor=COLOURS[moved],
            elinewidth=1.2,
            capsize=2.5,
        )
        axes.plot(
            *zip(*points, strict=True),
            mark,
            color=COLOURS[moved],
            markersize=4,
            alpha=0.8,
            label="as they are" if not moved else f"moved by {moved}",
        )
    axes.set_yticks(range(len(names)), names)
    axes.set(
        ylim=(len(names) - 0.5, -0.5),
        xlabel=f"{score}, in %, a point for each seed; bars: 2 standard errors",
    )
    axes.grid(axis="x")
    if distances > 1:
        figure.legend(loc="outside upper center", ncols=distances)
    return figure
