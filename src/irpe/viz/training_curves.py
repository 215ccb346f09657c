"""The curves of training runs, by epoch."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from irpe.viz.canvas import COLOURS, COLUMN, new_figure, panels, styled, whole_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metrics = Mapping[str, Sequence[float]]
_CLASSIFIER = ("epoch", "train_loss", "val_loss", "top1")
_DETECTOR = ("epoch", "train_loss", "AP", "AP50")
_DASHES = ("-", "--", ":", "-.")
_PALE = 0.35


@styled
def plot_training(runs: Mapping[str, Metrics]) -> "Figure":
    """Returns the curves of several runs: accuracy or average precision, and the losses.

    Args:
        runs: The columns of each run's table, by the name that the legend shows; NaN where an epoch
            was not evaluated.
    """
    if not runs:
        raise ValueError("nothing to draw: pass the metrics of at least one run")
    for name, metrics in runs.items():
        _check_columns(name, metrics)
    kinds = {_is_detector(metrics) for metrics in runs.values()}
    if len(kinds) > 1:
        raise ValueError("classifiers and detectors have no score in common: draw them apart")
    draw = _draw_detector if kinds == {True} else _draw_classifier
    figure = new_figure(COLUMN, 8.6 + 0.4 * len(runs))
    (score,), (loss,) = panels(figure, 2, 1)
    for index, (name, metrics) in enumerate(runs.items()):
        colour = COLOURS[index % len(COLOURS)]
        dashes = _DASHES[index // len(COLOURS) % len(_DASHES)]
        draw(score, loss, metrics, name, {"color": colour, "linestyle": dashes})
    for axes in (score, loss):
        axes.grid(axis="y")
        whole_ticks(axes.xaxis)
        for line in axes.lines:
            if len(line.get_path()) == 1:  # no line to see
                line.set(marker="o", markersize=3)
    figure.legend(loc="outside lower center")
    return figure


def _draw_classifier(score: Any, loss: Any, metrics: Metrics, name: str, style: Any) -> None:
    epochs, top1 = _evaluated(metrics, "top1")
    best = max(top1, default=math.nan)
    score.plot(epochs, top1, label=f"{name}, best {best:.2f} %", **style)
    loss.plot(*_evaluated(metrics, "val_loss"), **style)
    loss.plot(metrics["epoch"], metrics["train_loss"], alpha=_PALE, **style)
    score.set(ylabel="validation top-1, in %")
    loss.set(xlabel="epoch", ylabel="loss (in training: pale)")


def _draw_detector(score: Any, loss: Any, metrics: Metrics, name: str, style: Any) -> None:
    epochs, precision = _evaluated(metrics, "AP")
    best = max(precision, default=math.nan)  # none where val has no objects
    score.plot(epochs, precision, label=f"{name}, best AP {best:.3f}", **style)
    score.plot(*_evaluated(metrics, "AP50"), alpha=_PALE, **style)
    loss.plot(metrics["epoch"], metrics["train_loss"], **style)
    score.set(ylabel="validation AP (AP50: pale)")
    loss.set(xlabel="epoch", ylabel="loss in training")


def _is_detector(columns: Metrics) -> bool:
    return "AP" in columns


def _check_columns(run: str, columns: Metrics) -> None:
    needed = _DETECTOR if _is_detector(columns) else _CLASSIFIER
    missing = [name for name in needed if name not in columns]
    if missing:
        raise ValueError(
            f"the table of {run} has no column {missing[0]!r}: it needs {', '.join(needed)}"
        )


def _evaluated(metrics: Metrics, name: str) -> tuple[list[float], list[float]]:
    """Returns the epochs that were evaluated, and the values of a column there."""
    pairs = zip(metrics["epoch"], metrics[name], strict=True)
    known = [(epoch, value) for epoch, value in pairs if not math.isnan(value)]
    return [epoch for epoch, _ in known], [value for _, value in known]
