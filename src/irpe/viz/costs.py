"""What an encoding costs, drawn from measured values: Fig. 4 and 10, and times on a GPU."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from irpe.core.colours import COLOURS
from irpe.errors import UserError
from irpe.viz.canvas import COLUMN, new_figure, panels, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from irpe.profile.gpu import GpuReport

_MARKS = "osD^vP*X"


@styled
def plot_cost_curves(
    resolutions: Sequence[int], macs: Mapping[str, Sequence[float]], plain: Sequence[float]
) -> "Figure":
    """Returns Fig. 4: the multiply-accumulates that each implementation adds, by resolution.

    Args:
        resolutions: The sides of the images, in pixels.
        macs: What each implementation adds at each resolution, in multiply-accumulates.
        plain: Those of the model without an encoding, of which per cent are drawn.

    Examples:
        >>> import irpe.viz
        >>> added, plain = {"K": [45e6, 190e6]}, [4.6e9, 25e9]
        >>> figure = irpe.viz.plot_cost_curves([224, 448], added, plain)
    """
    for name, values in {"the plain model": plain, **macs}.items():
        if len(values) != len(resolutions):
            raise UserError(
                f"{name} has {len(values)} values for {len(resolutions)} resolutions: give as many"
            )
    figure = new_figure(COLUMN, 4.8 + 0.4 * len(macs))
    axes = figure.subplots()
    near: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 6}
    for index, (name, values) in enumerate(macs.items()):
        shares = [100 * value / whole for value, whole in zip(values, plain, strict=True)]
        mark, colour = _MARKS[index % len(_MARKS)], COLOURS[index % len(COLOURS)]
        label = name if any(shares) else f"{name}: nothing"
        axes.plot(resolutions, shares, marker=mark, markersize=3.5, color=colour, label=label)
        for at in (0, -1) if any(shares) else ():
            axes.annotate(f"{shares[at]:.2g} %", (resolutions[at], shares[at]), (0, 4), **near)
    axes.grid(axis="y")
    if any(value > 0 for values in macs.values() for value in values):
        from matplotlib.ticker import NullFormatter, StrMethodFormatter

        axes.set_yscale("log")  # else small costs are a line at the bottom
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.margins(x=0.08, y=0.15)
    axes.set(xlabel="resolution, in pixels", ylabel="extra MACs, in %")
    axes.set_xticks(list(resolutions))
    figure.legend(loc="outside upper center")
    return figure


@styled
def plot_cost_bars(
    times: Mapping[str, float], memory: Mapping[str, float], reference: str
) -> "Figure":
    """Returns Fig. 10: time and memory of each encoding, relative to a reference.

    Args:
        times: The time of one step, by encoding, in any unit.
        memory: The peak memory, by encoding, in any unit.
        reference: The name of the model without an encoding.

    Examples:
        >>> import irpe.viz
        >>> times, memory = {"none": 1.0, "K": 1.05}, {"none": 500, "K": 510}
        >>> figure = irpe.viz.plot_cost_bars(times, memory, reference="none")
    """
    names = [name for name in times if name != reference]
    if reference not in times or set(times) != set(memory) or not names:
        raise UserError(
            f"time of {', '.join(times)} and memory of {', '.join(memory)}: give both for the "
            f"same encodings and for the reference {reference!r}"
        )
    figure = new_figure(COLUMN, 2 * (0.5 * len(names) + 1.4))
    measured = (times, "time"), (memory, "memory")
    for (axes,), (values, label) in zip(panels(figure, 2, 1), measured, strict=True):
        extra = [100 * (values[name] / values[reference] - 1) for name in names]
        bars = axes.barh(names, extra, color=COLOURS[0] if label == "time" else COLOURS[4])
        axes.bar_label(bars, [f"{value:+.1f} %" for value in extra], padding=2, fontsize=6)
        axes.margins(x=0.2)
        axes.axvline(0, color="black", linewidth=0.6)
        axes.invert_yaxis()
        axes.set(xlabel=f"{label} beyond {reference}, in %")
    return figure


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
                face, ratio = colour if name == row.chosen else "none", time / row.without_ms
                style: dict[str, Any] = {"color": colour, "mfc": face, "markersize": 4}
                axes.plot(ratio, place, "o", label=label, **style)
                label = "_nolegend_"
        axes.set_yticks(range(len(rows)), [f"{row.model}, {row.encoding}" for row in rows])
        axes.invert_yaxis()
        axes.axvline(1, color="black", linewidth=0.6)
        axes.grid(axis="x")
        use = "training step" if training else "forward pass"
        axes.set(xlabel=f"time of a {use}, relative to attention without an encoding")
    figure.axes[0].legend(title=f"{report.device}; filled: taken by auto")
    return figure
