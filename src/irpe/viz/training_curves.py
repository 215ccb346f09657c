"""The curves of training runs, by epoch."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from irpe.core.colours import COLOURS
from irpe.errors import UserError
from irpe.viz.canvas import COLUMN, new_figure, panels, styled, whole_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metrics = Mapping[str, Sequence[float]]
_CLASSIFIER = ("epoch", "train_loss", "val_loss", "top1")
_DETECTOR = ("epoch", "train_loss", "AP", "AP50")
_SEGMENTER = ("epoch", "train_loss", "mIoU", "pixel_accuracy")
_DASHES = ("-", "--", ":", "-.")
_PALE = 0.35
_ONE_COLUMN, _ENTRIES = 4, 16  # entries of a legend of one column, and of any legend


@styled
def plot_training(runs: Mapping[str, Metrics | Sequence[Metrics]]) -> "Figure":
    """Returns the curves of several runs: accuracy, average precision or mIoU, and the losses.

    Args:
        runs: The columns of each run's table, by the name that the legend shows; NaN where an epoch
            was not evaluated. Several tables under one name, those of seeds, have one colour.

    Examples:
        >>> import irpe.viz
        >>> losses = {"train_loss": [1.2, 0.9], "val_loss": [1.1, 1.0]}
        >>> table = {"epoch": [1, 2], "top1": [60.0, 70.0], **losses}
        >>> figure = irpe.viz.plot_training({"K": table})
    """
    if not runs:
        raise UserError("nothing to draw: pass the metrics of at least one run")
    groups = {name: [x] if isinstance(x, Mapping) else list(x) for name, x in runs.items()}
    for name, tables in groups.items():
        for metrics in tables:
            _check_columns(name, metrics)
    kinds = {_needed(metrics) for tables in groups.values() for metrics in tables}
    if len(kinds) > 1:
        raise UserError(
            "classifiers, detectors and segmenters have no score in common: draw them apart"
        )
    draw = _DRAWN[kinds.pop()]
    columns = _columns(len(groups))
    lines = min(len(groups), _ENTRIES) / columns
    figure = new_figure(COLUMN * (1.5 if columns > 1 else 1), 9.2 + 0.45 * lines)
    (score,), (loss,) = panels(figure, 2, 1)
    labels: list[tuple[float, Any, str]] = []
    for index, (name, tables) in enumerate(groups.items()):
        dashes = _DASHES[index // len(COLOURS) % len(_DASHES)]
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes}
        first = len(score.lines)
        best = [draw(score, loss, metrics, style) for metrics in tables]
        text = f"{name}: {', '.join(_FORMATS[draw].format(value) for value in best)}"
        labels.append((max(best), score.lines[first], text))
    for axes in (score, loss):
        axes.grid(axis="y")
        whole_ticks(axes.xaxis)
        for line in axes.lines:
            if len(line.get_path()) == 1:  # no line to see
                line.set(marker="o", markersize=3)
    score.set_xlim(loss.get_xlim())
    _add_legend(figure, labels)
    return figure


def _columns(count: int) -> int:
    return 1 if count <= _ONE_COLUMN else 2


def _add_legend(figure: "Figure", labels: Sequence[tuple[float, Any, str]]) -> None:
    """Names the curves with their best scores; of very many, those with the best."""
    shown = list(labels)
    if len(shown) > _ENTRIES:
        best = sorted(labels, key=lambda label: -label[0] if label[0] == label[0] else math.inf)
        shown = [label for label in labels if label in best[:_ENTRIES]]
        figure.suptitle(f"the best {_ENTRIES} of {len(labels)} are named", fontsize=7)
    handles, texts = [line for _, line, _ in shown], [text for _, _, text in shown]
    columns, title = _columns(len(shown)), "best score of each run"
    legend = figure.legend(handles, texts, loc="outside lower center", ncols=columns, title=title)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _draw_classifier(score: Any, loss: Any, metrics: Metrics, style: Any) -> float:
    epochs, top1 = _evaluated(metrics, "top1")
    score.plot(epochs, top1, **style)
    loss.plot(*_evaluated(metrics, "val_loss"), **style)
    loss.plot(metrics["epoch"], metrics["train_loss"], alpha=_PALE, **style)
    score.set(ylabel="validation top-1, in %")
    loss.set(xlabel="epoch", ylabel="loss (in training: pale)")
    return max(top1, default=math.nan)


def _draw_detector(score: Any, loss: Any, metrics: Metrics, style: Any) -> float:
    epochs, precision = _evaluated(metrics, "AP")
    score.plot(epochs, precision, **style)
    score.plot(*_evaluated(metrics, "AP50"), alpha=_PALE, **style)
    loss.plot(metrics["epoch"], metrics["train_loss"], **style)
    score.set(ylabel="validation AP (AP50: pale)")
    loss.set(xlabel="epoch", ylabel="loss in training")
    return max(precision, default=math.nan)  # none where val has no objects


def _draw_segmenter(score: Any, loss: Any, metrics: Metrics, style: Any) -> float:
    epochs, miou = _evaluated(metrics, "mIoU")
    score.plot(epochs, miou, **style)
    loss.plot(metrics["epoch"], metrics["train_loss"], **style)
    score.set(ylabel="validation mIoU, in %")
    loss.set(xlabel="epoch", ylabel="loss in training")
    return max(miou, default=math.nan)


_DRAWN: dict[tuple[str, ...], Any] = {
    _CLASSIFIER: _draw_classifier,
    _DETECTOR: _draw_detector,
    _SEGMENTER: _draw_segmenter,
}
_FORMATS = {
    _draw_classifier: "{:.1f} %",
    _draw_detector: "AP {:.3f}",
    _draw_segmenter: "mIoU {:.1f}",
}


def _needed(columns: Metrics) -> tuple[str, ...]:
    """Returns the columns that a table needs, by the score that it has."""
    return _DETECTOR if "AP" in columns else _SEGMENTER if "mIoU" in columns else _CLASSIFIER


def _check_columns(run: str, columns: Metrics) -> None:
    needed = _needed(columns)
    missing = [name for name in needed if name not in columns]
    if missing:
        raise UserError(
            f"the table of {run} has no column {missing[0]!r}: it needs {', '.join(needed)}"
        )


def _evaluated(metrics: Metrics, name: str) -> tuple[list[float], list[float]]:
    """Returns the epochs that were evaluated, and the values of a column there."""
    pairs = zip(metrics["epoch"], metrics[name], strict=True)
    known = [(epoch, value) for epoch, value in pairs if not math.isnan(value)]
    return [epoch for epoch, _ in known], [value for _, value in known]
