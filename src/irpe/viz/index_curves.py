"""Fig. 2: the piecewise index function against the clip function."""

from typing import TYPE_CHECKING

import torch

from irpe.core.colours import COLOURS
from irpe.core.index import Clip, Index, Piecewise
from irpe.errors import UserError
from irpe.viz.canvas import COLUMN, new_figure, styled, whole_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STEPS = 4000


@styled
def plot_index(
    piecewise: Piecewise | None = None, clip: Clip | None = None, farthest: float | None = None
) -> "Figure":
    """Returns Fig. 2: the bucket of each distance, by both functions.

    Args:
        piecewise: g of Eq. 18; `None` takes ratio 4, which shows all three parts at once.
        clip: h of Eq. 9; `None` takes the clip function with as many buckets.
        farthest: The distances run from -farthest to farthest; `None` shows a little more than
            where the piecewise function stops.

    Examples:
        >>> import irpe, irpe.viz
        >>> figure = irpe.viz.plot_index(irpe.Piecewise.from_ratio(1.9), irpe.Clip(3))
    """
    piecewise = piecewise or Piecewise.from_ratio(4)
    clip = clip or Clip(max(piecewise.max_index, 1))
    farthest = 1.25 * max(piecewise.gamma, clip.beta) if farthest is None else farthest
    if not farthest > 0:
        raise UserError(f"farthest = {farthest} must be greater than 0: a distance in patches")
    figure = new_figure(COLUMN, 6)
    axes = figure.subplots()
    axes.axhline(0, color="#BBBBBB", linewidth=0.5)
    axes.axvline(0, color="#BBBBBB", linewidth=0.5)
    named: list[tuple[Index, str, str]] = [
        (piecewise, f"piecewise g(x), {_name(piecewise)}", "-"),
        (clip, rf"clip h(x), $\beta = {clip.beta:g}$", "--"),
    ]
    x = torch.linspace(-farthest, farthest, _STEPS + 1, dtype=torch.float64)
    for (index, label, dashes), colour in zip(named, COLOURS, strict=False):
        axes.plot(x.tolist(), index(x).tolist(), dashes, color=colour, label=label)
    for bound in (-piecewise.alpha, piecewise.alpha):
        axes.axvline(bound, color=COLOURS[0], linewidth=0.5, linestyle=":")
    axes.annotate(
        r"$\alpha$", (piecewise.alpha, 0), (2, 2), textcoords="offset points", color=COLOURS[0]
    )
    axes.set(xlabel="relative distance x, in patches", ylabel="bucket")
    whole_ticks(axes.yaxis)
    figure.legend(loc="outside upper center")
    return figure


def _name(index: Piecewise) -> str:
    return rf"$\alpha:\beta:\gamma = {index.alpha:g}:{index.beta:g}:{index.gamma:g}$"
