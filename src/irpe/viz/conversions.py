"""What a model that was made relative has lost, and where position can be read, by attention."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from irpe.core.colours import COLOURS
from irpe.viz.canvas import COLUMN, new_figure, panels, styled, whole_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def plot_conversion(
    before: Sequence[float], after: Sequence[float], tokens: Sequence[float]
) -> "Figure":
    """Returns two panels: the divergence of attention rows, and how well tokens agree.

    Args:
        before: The divergence from the original's attention without tables, by attention.
        after: The same with the solved tables.
        tokens: R2 of the tokens that enter each attention.

    Examples:
        >>> import irpe.viz
        >>> figure = irpe.viz.plot_conversion([1.5, 4.2], [0.3, 0.6], tokens=[0.98, 0.84])
    """
    figure = new_figure(2 * COLUMN, 5.5)
    ((left, right),) = panels(figure, 1, 2)
    indices = range(len(before))
    left.bar([i - 0.2 for i in indices], before, 0.4, color=COLOURS[7], label="no tables here")
    left.bar([i + 0.2 for i in indices], after, 0.4, color=COLOURS[0], label="solved tables")
    left.set(title="divergence from the original's attention", ylabel="nats a row")
    left.legend()
    right.plot(indices, tokens, "o-", color=COLOURS[0], markersize=3)
    right.set(title="tokens that enter, against the original's", ylabel="R2")
    right.set_ylim(min(0.0, *tokens), 1.02)
    for axes in (left, right):
        axes.set_xlabel("attention")
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        whole_ticks(axes.xaxis)
    return figure


@styled
def plot_position_probe(curves: Mapping[str, Sequence[float]]) -> "Figure":
    """Returns a panel of curves: how well positions can be read, attention by attention.

    Args:
        curves: R2 on held-out images, by label.

    Examples:
        >>> import irpe.viz
        >>> figure = irpe.viz.plot_position_probe({"row": [0.99, 0.9], "column": [0.99, 0.8]})
    """
    figure = new_figure(COLUMN, 5.5)
    ((axes,),) = panels(figure, 1, 1)
    for index, (label, values) in enumerate(curves.items()):
        axes.plot(values, "os^D"[index % 4] + "-", color=COLOURS[index], markersize=3, label=label)
    axes.set(xlabel="attention", ylabel="R2 on held-out images", title="position in the tokens")
    axes.set_ylim(min(-0.05, *(min(values) for values in curves.values())), 1.02)
    axes.grid(axis="y")
    axes.legend()
    whole_ticks(axes.xaxis)
    return figure
