"""The curves of training runs, by epoch."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from irpe.core.colours import COLOURS
from irpe.errors import UserError
from irpe.train.task import Measure
from irpe.viz.canvas import COLUMN, new_figure, panels, styled, whole_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metrics = Mapping[str, Sequence[float]]
# Columns that are not scores.
_OTHERS = (
    "epoch", "lr", "train_loss", "val_loss", "effect", "seconds", "images_per_second", "broken",
    "val_broken",
)  # fmt: skip
_DASHES = ("-", "--", ":", "-.")
_PALE = 0.35
_ONE_COLUMN, _ENTRIES = 4, 16  # entries of a legend of one column, and of any legend


@styled
def plot_training(
    runs: Mapping[str, Metrics | Sequence[Metrics]], measure: Measure | None = None
) -> "Figure":
    """Returns the curves of several runs: the score that is compared, and the losses.

    Args:
        runs: The columns of each run's table, by the name that the legend shows; NaN where an epoch
            was not evaluated. Several tables under one name, those of seeds, have one colour.
        measure: What is compared; `None`: the first column that is a score, of which more is
            better.

    Examples:
        >>> import irpe.viz
        >>> losses = {"train_loss": [1.2, 0.9], "val_loss": [1.1, 1.0]}
        >>> table = {"epoch": [1, 2], "top1": [60.0, 70.0], **losses}
        >>> figure = irpe.viz.plot_training({"K": table})
    """
    if not runs:
        raise UserError("nothing to draw: pass the metrics of at least one run")
    groups = {name: [x] if isinstance(x, Mapping) else list(x) for name, x in runs.items()}
    measure = measure or _first_score(groups)
    for name, tables in groups.items():
        for metrics in tables:
            _check_columns(name, metrics, measure)
    columns = _columns(len(groups))
    lines = min(len(groups), _ENTRIES) / columns
    figure = new_figure(COLUMN * (1.5 if columns > 1 else 1), 9.2 + 0.45 * lines)
    (score,), (loss,) = panels(figure, 2, 1)
    labels: list[tuple[float, Any, str]] = []
    for index, (name, tables) in enumerate(groups.items()):
        dashes = _DASHES[index // len(COLOURS) % len(_DASHES)]
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes}
        first = len(score.lines)
        best = [_draw(score, loss, metrics, measure, style) for metrics in tables]
        text = f"{name}: {', '.join(f'{value:.{measure.digits}f}' for value in best)}"
        sign = 1 if measure.higher_is_better else -1
        labels.append((max(sign * value for value in best), score.lines[first], text))
    score.set(ylabel=f"validation {measure.name}{', in %' if measure.unit == '%' else ''}")
    loss.set(xlabel="epoch", ylabel="loss (pale: in training, beside that of validation)")
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


def _draw(score: Any, loss: Any, metrics: Metrics, measure: Measure, style: Any) -> float:
    """Draws the curves of a run, and returns its best score."""
    epochs, values = _evaluated(metrics, measure.key)
    score.plot(epochs, values, **style)
    if "val_loss" in metrics:
        loss.plot(*_evaluated(metrics, "val_loss"), **style)
    alpha = _PALE if "val_loss" in metrics else 1.0
    loss.plot(metrics["epoch"], metrics["train_loss"], alpha=alpha, **style)
    return (max if measure.higher_is_better else min)(values, default=math.nan)


def _first_score(groups: Mapping[str, Sequence[Metrics]]) -> Measure:
    first = next(iter(groups.values()))[0]
    scores = [name for name in first if name not in _OTHERS]
    if not scores:
        raise UserError(f"the tables have no score beside {', '.join(first)}")
    return Measure(scores[0], scores[0])


def _check_columns(run: str, columns: Metrics, measure: Measure) -> None:
    for name in ("epoch", "train_loss", measure.key):
        if name not in columns:
            raise UserError(
                f"the table of {run} has no column {name!r}: draw runs of one task, whose score "
                f"is {measure.key}"
            )


def _evaluated(metrics: Metrics, name: str) -> tuple[list[float], list[float]]:
    """Returns the epochs that were evaluated, and the values of a column there."""
    pairs = zip(metrics["epoch"], metrics[name], strict=True)
    known = [(epoch, value) for epoch, value in pairs if not math.isnan(value)]
    return [epoch for epoch, _ in known], [value for _, value in known]
