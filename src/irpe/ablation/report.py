"""The report of an ablation: numbers, figures, and sentences that claim no more than the data."""

import dataclasses
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import timm
import torch

import irpe
from irpe.ablation.cells import SHIFTS, Cell
from irpe.ablation.statistics import RowResult, compare
from irpe.files import write_text
from irpe.train.runs import read_metrics
from irpe.viz import plot_scores, plot_training, save_figure

_VERDICTS = {"better": "better than", "tie": "tie with", "worse": "worse than"}


def sentences(rows: Sequence[RowResult]) -> list[str]:
    """Returns what the data does and does not support, compared with one row, in plain words."""
    reference = next((row for row in rows if row.name == "absolute"), rows[0])
    others = [row for row in rows if row is not reference]
    count = len(reference.results[0].correct[0])
    seeds = len(reference.results)
    text = [
        f"{count:,} test images, {seeds} seed{'s' * (seeds > 1)}. Two rows differ only if every "
        "seed of one beats every seed of the other and the difference is more than twice its "
        "standard error over the test images; all else is called a tie."
    ]
    if seeds < 2:
        text.append("One seed: how much seeds differ is not known, so no difference is claimed.")
    return text + [_comparison(others, reference, s) for s in SHIFTS if seeds > 1 and others]


def _comparison(others: Sequence[RowResult], reference: RowResult, shift: int) -> str:
    where = "as they are" if not shift else f"moved by {shift} patch{'es' * (shift > 1)}"
    found: list[str] = []
    for verdict, words in _VERDICTS.items():
        names = [
            f"{row.name} ({row.mean(shift) - reference.mean(shift):+.1f})"
            for row in others
            if compare(row, reference, shift) == verdict
        ]
        if names:
            found.append(f"{words} {reference.name}: {', '.join(names)}")
    return f"Images {where}: {'; '.join(found)}."


def markdown_table(rows: Sequence[RowResult]) -> str:
    """Returns the final table."""
    cheapest = min(row.cost.step for row in rows)
    head = "| | top-1 | moved by 1 | moved by 2 | top-5 | parameters | MACs (M) | time per step |"
    lines = [
        f"| {row.name} | "
        + " | ".join(f"{row.mean(s):.1f} ± {row.spread(s):.1f}" for s in SHIFTS)
        + f" | {statistics.mean(r.top5 for r in row.results):.1f} | {row.cost.parameters:,} | "
        f"{row.cost.macs / 1e6:.2f} | {1e3 * row.cost.step:.0f} ms "
        f"({row.cost.step / cheapest:.2f}x) |"
        for row in rows
    ]
    return "\n".join([head, "| --- |" + " --- |" * 7, *lines])


def write_report(
    directory: Path, title: str, rows: Sequence[RowResult], cells: Sequence[Cell]
) -> None:
    """Writes report.md, results.json and the figures.

    Args:
        directory: Where to.
        title: The heading.
        rows: The results by row.
        cells: The runs behind them.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = cells[0].config
    settings = {
        **dataclasses.asdict(config), "encoding": "by row", "absolute": "by row", "seed": "by cell",
    }  # fmt: skip
    content = {
        "title": title,
        "rows": [_as_json(row) for row in rows],
        "sentences": sentences(rows),
        "settings": settings,
        "versions": _versions(),
    }
    write_text(directory / "results.json", json.dumps(content, indent=2) + "\n")
    for name, figure in _figures(rows, cells).items():
        save_figure(figure, directory / f"{name}.png")
    versions = ", ".join(f"{name} {value}" for name, value in _versions().items())
    body = [
        f"# {title}",
        "\n".join(f"- {sentence}" for sentence in sentences(rows)),
        markdown_table(rows),
        "Mean over the seeds ± half the distance between the best and the worst seed. Moved: each "
        "image shifted right, down, left or up by whole patches, black where nothing is known.",
        "![Top-1 of each row](top1.png)",
        "![The curves of the first seed](curves.png)",
        f"{config.epochs} epochs, batch {config.batch_size}, learning rate {config.lr}, the same "
        f"for every row; data: {config.data}; {versions}.",
    ]
    write_text(directory / "report.md", "\n\n".join(body) + "\n")


def _as_json(row: RowResult) -> dict[str, Any]:
    return {
        "row": row.name,
        "top1": [row.mean(shift) for shift in SHIFTS],
        "spread": [row.spread(shift) for shift in SHIFTS],
        "seeds": [
            {"seed": r.seed, "top1": [r.top1(s) for s in SHIFTS], "top5": r.top5}
            for r in row.results
        ],
        **dataclasses.asdict(row.cost),
    }


def _figures(rows: Sequence[RowResult], cells: Sequence[Cell]) -> dict[str, Any]:
    scores = {
        row.name: [[result.top1(shift) for result in row.results] for shift in SHIFTS]
        for row in rows
    }
    runs = {c.row.name: read_metrics(c.directory) for c in cells if c.config.seed == 0}
    return {"top1": plot_scores(scores), "curves": plot_training(runs)}


def _versions() -> dict[str, Any]:
    return {
        "irpe": irpe.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
    }
