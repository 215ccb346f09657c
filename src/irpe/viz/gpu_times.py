"""What each implementation takes on a GPU, relative to attention without an encoding."""

from typing import TYPE_CHECKING

from irpe.core.colours import COLOURS
from irpe.errors import UserError
from irpe.viz.canvas import COLUMN, new_figure, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from irpe.profile.gpu import GpuReport


@styled
def plot_gpu_times(report: "GpuReport") -> "Figure":
    """Returns the times of a GPU report: a point for each implementation, the chosen one filled.

    Args:
        report: What `irpe.profile.gpu.measure_gpu` returns.

    Examples:
        >>> import irpe.viz
        >>> from irpe.profile.gpu import AttentionTimes, GpuReport  # measure_gpu returns one
        >>> row = AttentionTimes("ViT-S", "K", True, "fast", 1.0, {"fast": 1.2}, {})
        >>> figure = irpe.viz.plot_gpu_times(GpuReport("a GPU", {}, [row]))
    """
    if not report.attentions:
        raise UserError("a report without attentions: measure at least one size and encoding")
    names = sorted({name for row in report.attentions for name in row.ms})
    uses = sorted({row.training for row in report.attentions}, reverse=True)
    figure = new_figure(2 * COLUMN, 0.5 * len(report.attentions) + 3.0 * len(uses))
    for (axes,), training in zip(panels(figure, len(uses), 1), uses, strict=True):
        rows = [row for row in report.attentions if row.training == training]
        for index, name in enumerate(names):
            colour, label = COLOURS[index % len(COLOURS)], name
            for place, row in enumerate(rows):
                time = row.ms.get(name)
                if time is None:
                    continue
                face = colour if name == row.chosen else "none"
                ratio = time / row.without_ms
                axes.plot(
                    ratio, place, "o", color=colour, markerfacecolor=face, markersize=4, label=label
                )
                label = "_nolegend_"
        axes.set_yticks(range(len(rows)), [f"{row.model}, {row.encoding}" for row in rows])
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.6)
        axes.grid(axis="x")
        use = "training step" if training else "forward pass"
        axes.set(xlabel=f"time of a {use}, relative to attention without an encoding")
    figure.axes[0].legend(title=f"{report.device}; filled: taken by auto")
    return figure
