"""Figures of an ablation: the scores of its rows, and how they came about."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Okabe and Ito's colours, which the colour-blind can tell apart.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000", "#999999")
_MARKERS = ("o", "s", "D")
_STYLES = ("-", "--", ":")


def scores(points: Mapping[str, Sequence[Sequence[float]]]) -> Any:
    """Returns a figure with a point for each row, seed and distance.

    Args:
        points: Top-1 by row, then by the patches that images are moved, then by seed.
    """
    from matplotlib.figure import Figure

    names = list(points)
    figure = Figure(figsize=(6.0, 0.9 + 0.36 * len(names)), layout="constrained")
    axes = figure.subplots()
    for moved in range(len(points[names[0]])):
        for number, name in enumerate(names):
            values = points[name][moved]
            axes.plot(
                values,
                [number] * len(values),
                _MARKERS[moved],
                color=COLOURS[moved],
                markersize=6,
                alpha=0.8,
                label=_label(moved) if number == 0 else None,
            )
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("top-1 (%), a point for each seed")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    return figure


def curves(runs: Sequence[tuple[str, Path]]) -> Any:
    """Returns a figure with top-1 after each epoch.

    Args:
        runs: The name of each run, and its table of epochs; runs with one name get one colour.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(name for name, _ in runs))
    drawn: set[str] = set()
    for name, path in runs:
        with path.open() as file:
            rows = list(csv.DictReader(file))
        number = names.index(name)
        axes.plot(
            [int(row["epoch"]) for row in rows],
            [float(row["top1"]) for row in rows],
            linestyle=_STYLES[number // len(COLOURS) % len(_STYLES)],
            color=COLOURS[number % len(COLOURS)],
            linewidth=1.5,
            marker=".",
            label=None if name in drawn else name,
        )
        drawn.add(name)
    axes.set_xlabel("epoch")
    axes.set_ylabel("top-1 (%)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside right center", frameon=False)
    return figure


def _label(moved: int) -> str:
    return "as they are" if not moved else f"moved by {moved}"
