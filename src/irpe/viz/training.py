"""The curves of training runs, from the metrics that they wrote."""

import csv
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irpe.viz.canvas import COLOURS, COLUMN, new_figure, panels, styled, whole_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METRICS = "metrics.csv"
Metrics = Mapping[str, Sequence[float]]
_CLASSIFIER = ("epoch", "train_loss", "val_loss", "top1")
_DETECTOR = ("epoch", "train_loss", "AP", "AP50")
_EACH_EPOCH = ("epoch", "train_loss")  # evaluated or not
_DASHES = ("-", "--", ":", "-.")
_PALE = 0.35


def read_metrics(run: str | os.PathLike[str]) -> dict[str, list[float]]:
    """Returns the columns of a run's metrics, one number an epoch, NaN where it was not evaluated.

    Args:
        run: The folder of the run.
    """
    path = Path(run) / METRICS
    if not path.is_file():
        hint = f"; it holds runs, pass {run}/*" if any(Path(run).glob(f"*/{METRICS}")) else ""
        raise FileNotFoundError(f"{path} does not exist: {run} is no training run{hint}")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, strict=True))
        columns = {name: [_number(name, line[name]) for line in lines] for name in lines[0]}
    except (csv.Error, IndexError, TypeError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path} is damaged or empty: {error}") from error
    needed = _DETECTOR if _is_detector(columns) else _CLASSIFIER
    missing = [name for name in needed if name not in columns]
    if missing:
        raise ValueError(f"{path} has no column {missing[0]!r}: it needs {', '.join(needed)}")
    return columns


@styled
def plot_training(runs: Mapping[str, Metrics]) -> "Figure":
    """Returns the curves of several runs: accuracy or average precision, and the losses.

    Args:
        runs: The metrics of each run, by the name that the legend shows.
    """
    if not runs:
        raise ValueError("nothing to draw: pass the metrics of at least one run")
    kinds = {_is_detector(metrics) for metrics in runs.values()}
    if len(kinds) > 1:
        raise ValueError("classifiers and detectors have no score in common: draw them apart")
    draw = _draw_detector if kinds == {True} else _draw_classifier
    figure = new_figure(COLUMN, 8.6 + 0.4 * len(runs))
    (score,), (loss,) = panels(figure, 2, 1)
    for number, (name, metrics) in enumerate(runs.items()):
        colour = COLOURS[number % len(COLOURS)]
        dashes = _DASHES[number // len(COLOURS) % len(_DASHES)]
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


def _number(name: str, cell: str) -> float:
    return math.nan if cell == "" and name not in _EACH_EPOCH else float(cell)


def _evaluated(metrics: Metrics, name: str) -> tuple[list[float], list[float]]:
    """Returns the epochs that were evaluated, and a column's numbers there."""
    pairs = zip(metrics["epoch"], metrics[name], strict=True)
    known = [(epoch, value) for epoch, value in pairs if not math.isnan(value)]
    return [epoch for epoch, _ in known], [value for _, value in known]
