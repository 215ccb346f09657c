"""Scores: of an ablation, of training runs by epoch, and on images unlike those of training."""

import math
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

from irpe.core.colours import COLOURS
from irpe.errors import UserError
from irpe.train.task import Measure
from irpe.viz.canvas import COLUMN, new_figure, panels, styled, whole_ticks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Metrics = Mapping[str, Sequence[float]]
At = float | tuple[int, int]
Curves = Mapping[str, Mapping[At, Sequence[float]]]
_MARKS = "osD^v<>P"
_DASHES = ("-", "--", ":", "-.")
_PALE = 0.35
_ONE_COLUMN, _ENTRIES = 4, 16  # entries of a legend of one column, and of any legend
_COLUMNS = 4  # of the legend below panels side by side
# Columns of a run's table that are not scores.
_OTHERS = (
    "epoch", "lr", "train_loss", "val_loss", "effect", "seconds", "images_per_second", "broken",
    "val_broken",
)  # fmt: skip


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
        means = [fmean(scores[name][moved]) for name in names]
        bars: dict[str, Any] = {"ecolor": COLOURS[moved], "elinewidth": 1.2, "capsize": 2.5}
        errors_of = [2 * errors[name][moved] for name in names]
        axes.errorbar(means, range(len(names)), xerr=errors_of, fmt="none", **bars)
        axes.plot(
            *zip(*points, strict=True), mark, color=COLOURS[moved], markersize=4, alpha=0.8,
            label=f"moved by {moved}" if moved else "as they are",
        )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set(
        ylim=(len(names) - 0.5, -0.5),
        xlabel=f"{score}, in %, a point for each seed; bars: 2 standard errors",
    )
    axes.grid(axis="x")
    if distances > 1:
        figure.legend(loc="outside upper center", ncols=distances)
    return figure


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
    if measure is None:
        names = list(next(iter(groups.values()))[0])
        scores = [name for name in names if name not in _OTHERS]
        if not scores:
            raise UserError(f"the tables have no score beside {', '.join(names)}")
        measure = Measure(scores[0], scores[0])
    for name, table in ((name, table) for name, tables in groups.items() for table in tables):
        for column in ("epoch", "train_loss", measure.key):
            if column not in table:
                raise UserError(
                    f"the table of {name} has no column {column!r}: draw runs of one task, whose "
                    f"score is {measure.key}"
                )
    columns = 1 if len(groups) <= _ONE_COLUMN else 2
    lines = min(len(groups), _ENTRIES) / columns
    figure = new_figure(COLUMN * (1.5 if columns > 1 else 1), 9.2 + 0.45 * lines)
    (score,), (loss,) = panels(figure, 2, 1)
    labels: list[tuple[float, Any, str]] = []
    for index, (name, tables) in enumerate(groups.items()):
        style = _style(index)
        first = len(score.lines)
        best = [_draw_run(score, loss, metrics, measure, style) for metrics in tables]
        text = f"{name}: {', '.join(f'{value:.{measure.digits}f}' for value in best)}"
        sign = 1 if measure.higher_is_better else -1
        labels.append((max(sign * value for value in best), score.lines[first], text))
    score.set(ylabel=f"validation {_title(measure)}")
    loss.set(xlabel="epoch", ylabel="loss (pale: in training, beside that of validation)")
    for axes in (score, loss):
        axes.grid(axis="y")
        whole_ticks(axes.xaxis)
        for line in axes.lines:
            if len(line.get_path()) == 1:  # no line to see
                line.set(marker="o", markersize=3)
    score.set_xlim(loss.get_xlim())
    shown = labels
    if len(labels) > _ENTRIES:
        best = sorted(labels, key=lambda label: math.inf if math.isnan(label[0]) else -label[0])
        shown = [label for label in labels if label in best[:_ENTRIES]]
        figure.suptitle(f"the best {_ENTRIES} of {len(labels)} are named", fontsize=7)
    legend = figure.legend(
        [line for _, line, _ in shown], [text for _, _, text in shown], ncols=columns,
        loc="outside lower center", title="best score of each run",
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _draw_run(score: Any, loss: Any, metrics: Metrics, measure: Measure, style: Any) -> float:
    """Draws the curves of a run, and returns its best score."""

    def evaluated(name: str) -> tuple[list[float], list[float]]:
        pairs = zip(metrics["epoch"], metrics[name], strict=True)
        known = [pair for pair in pairs if not math.isnan(pair[1])]
        return [epoch for epoch, _ in known], [value for _, value in known]

    epochs, values = evaluated(measure.key)
    score.plot(epochs, values, **style)
    if "val_loss" in metrics:
        loss.plot(*evaluated("val_loss"), **style)
    alpha = _PALE if "val_loss" in metrics else 1.0
    loss.plot(metrics["epoch"], metrics["train_loss"], alpha=alpha, **style)
    return (max if measure.higher_is_better else min)(values, default=math.nan)


def _style(index: int) -> dict[str, Any]:
    """Returns a colour and dashes for a curve."""
    dashes = _DASHES[index // len(COLOURS) % len(_DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": dashes}


def _title(measure: Measure) -> str:
    return f"{measure.name}{', in %' if measure.unit == '%' else ''}"


@styled
def plot_robustness(
    curves: Mapping[str, Curves],
    titles: Mapping[str, str],
    measure: Measure,
    trained: Mapping[str, Collection[At]] | None = None,
    errors: Mapping[str, Curves] | None = None,
) -> "Figure":
    """Returns a panel for each condition: the mean of the seeds as a line, each seed as a point.

    A bar around the mean is twice the standard error over the images, both ways.

    Args:
        curves: The scores by what changed, then by label, by how much (a number, or rows and
            columns), and by seed.
        titles: What each condition is called.
        measure: What the scores are.
        trained: What the models were trained at, by what changed; dotted.
        errors: The standard error of each score over the images, where it is known.

    Examples:
        >>> import irpe.viz
        >>> from irpe.train import Measure
        >>> sizes = {"K": {(48, 48): [70.1, 71.0], (48, 96): [75.0, 76.2]}}
        >>> measure = Measure("top1", "top-1", "%")
        >>> figure = irpe.viz.plot_robustness({"size": sizes}, {"size": "size"}, measure)
    """
    labels = list(next(iter(curves.values()), ()))
    if not labels or any(list(of_panel) != labels for of_panel in curves.values()):
        raise UserError("every panel needs curves of the same labels, one at least")
    figure = new_figure(len(curves) * COLUMN, 5.8 + 0.4 * -(-len(labels) // _COLUMNS))
    (drawn,) = panels(figure, 1, len(curves))
    handles: list[Any] = []
    for axes, (name, of_panel) in zip(drawn, curves.items(), strict=True):
        for at in (trained or {}).get(name, ()):
            axes.axvline(_place(at), color="#999999", linestyle=":", linewidth=0.8, zorder=0)
        handles = []  # of each curve its line and its points
        for index, (label, scores) in enumerate(of_panel.items()):
            style = _style(index)
            conditions = sorted(scores, key=_place)
            places = [_place(each) for each in conditions]
            means = [fmean(scores[condition]) for condition in conditions]
            (line,) = axes.plot(places, means, **style, label=label)
            if errors is not None and name in errors:
                bars = [2 * fmean(errors[name][label][each]) for each in conditions]
                bar_style: dict[str, Any] = {"ecolor": style["color"], "elinewidth": 0.8}
                axes.errorbar(places, means, bars, fmt="none", **bar_style)
            points = [(_place(each), score) for each in conditions for score in scores[each]]
            seed_style: dict[str, Any] = {"markersize": 3.5, "alpha": 0.7, "mew": 0}
            mark, seed_style["color"] = _MARKS[index % len(_MARKS)], style["color"]
            (seeds,) = axes.plot(*zip(*points, strict=True), mark, **seed_style)
            handles.append((line, seeds))
        ticks = sorted({at for scores in of_panel.values() for at in scores}, key=_place)
        axes.set_xticks([_place(at) for at in ticks], [text_of(at) for at in ticks])
        axes.grid(axis="y")
        axes.set_xlabel(titles[name])
        if axes is not drawn[0]:
            axes.sharey(drawn[0])
    drawn[0].set_ylabel(_title(measure))
    drawn[0].autoscale(axis="y")
    columns = min(len(labels), _COLUMNS)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns)
    return figure


def _place(at: At) -> float:
    """Returns where a condition is on the axis: the root of the area, for rows and columns."""
    return math.sqrt(at[0] * at[1]) if isinstance(at, tuple) else at


def text_of(at: At) -> str:
    """Returns how a condition is called: 48 for a square, 32x64, or a number."""
    if isinstance(at, tuple):
        return str(at[0]) if at[0] == at[1] else f"{at[0]}x{at[1]}"
    return f"{at:g}"
