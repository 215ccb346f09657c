"""Fig. 4 and 10: what an encoding costs, drawn from measured values."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from irpe.core.colours import COLOURS
from irpe.errors import UserError
from irpe.viz.canvas import COLUMN, new_figure, panels, styled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
    for index, (name, values) in enumerate(macs.items()):
        shares = [100 * value / whole for value, whole in zip(values, plain, strict=True)]
        axes.plot(
            resolutions,
            shares,
            marker=_MARKS[index % len(_MARKS)],
            markersize=3.5,
            color=COLOURS[index % len(COLOURS)],
            label=name if any(shares) else f"{name}: nothing",
        )
        for at in (0, -1) if any(shares) else ():
            _write_share(axes, resolutions[at], shares[at])
    axes.grid(axis="y")
    if any(value > 0 for values in macs.values() for value in values):
        _scale_by_factors(axes)
    axes.set(xlabel="resolution, in pixels", ylabel="extra MACs, in %")
    axes.set_xticks(list(resolutions))
    figure.legend(loc="outside upper center")
    return figure


def _write_share(axes: "Axes", resolution: int, share: float) -> None:
    place: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "fontsize": 6}
    axes.annotate(f"{share:.2g} %", (resolution, share), (0, 4), **place)


def _scale_by_factors(axes: "Axes") -> None:
    """Gives equal factors equal heights, so that small costs are not a line at the bottom."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(_plain_number))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.08, y=0.15)


def _plain_number(value: float, _: object) -> str:
    return f"{value:g}"


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
