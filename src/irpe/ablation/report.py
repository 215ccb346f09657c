"""What an ablation found, in numbers and in plain words that claim no more than the data."""

import dataclasses
import json
import math
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch

import irpe
from irpe.ablation.cells import MOVES, Cell, Cost, Result
from irpe.files import write_text
from irpe.viz.canvas import save_figure


@dataclass(frozen=True)
class Line:
    """A row of the final table.

    Args:
        row: Its name.
        results: One for each seed.
        cost: What it costs.
    """

    row: str
    results: tuple[Result, ...]
    cost: Cost

    def mean(self, moved: int = 0) -> float:
        """Returns the mean top-1 over the seeds."""
        return statistics.mean(result.top1(moved) for result in self.results)

    def spread(self, moved: int = 0) -> float:
        """Returns half the distance between the best and the worst seed."""
        scores = [result.top1(moved) for result in self.results]
        return (max(scores) - min(scores)) / 2


def make_lines(results: Sequence[Result], costs: dict[str, Cost]) -> list[Line]:
    """Returns the rows of the final table, in the order of the results."""
    names = dict.fromkeys(result.row for result in results)
    return [
        Line(name, tuple(result for result in results if result.row == name), costs[name])
        for name in names
    ]


def compare(line: Line, other: Line, moved: int = 0) -> str:
    """Returns "better", "worse" or "tie", and "unknown" where one seed cannot tell.

    Two rows differ if every seed of one beats every seed of the other, and if their mean difference
    on the test images is more than twice its standard error over these images.
    """
    if min(len(line.results), len(other.results)) < 2:
        return "unknown"
    own = [result.top1(moved) for result in line.results]
    others = [result.top1(moved) for result in other.results]
    difference, error = _paired(line, other, moved)
    if abs(difference) <= 2 * error:
        return "tie"
    if min(own) > max(others):
        return "better"
    return "worse" if max(own) < min(others) else "tie"


def sentences(lines: Sequence[Line]) -> list[str]:
    """Returns what the data does and does not support, compared with one row, in plain words."""
    reference = next((line for line in lines if line.row == "absolute"), lines[0])
    others = [line for line in lines if line is not reference]
    count = len(reference.results[0].hits[0])
    seeds = len(reference.results)
    text = [
        f"{count:,} test images, {seeds} seed{'s' * (seeds > 1)}. Two rows differ only if every "
        "seed of one beats every seed of the other and the difference is more than twice its "
        "standard error over the test images; all else is called a tie."
    ]
    if seeds < 2:
        text.append("One seed: how much seeds differ is not known, so no difference is claimed.")
    return text + [_verdicts(others, reference, moved) for moved in MOVES if seeds > 1 and others]


def _verdicts(others: Sequence[Line], reference: Line, moved: int) -> str:
    where = "as they are" if not moved else f"moved by {moved} patch{'es' * (moved > 1)}"
    found: list[str] = []
    for verdict, word in {
        "better": "better than",
        "tie": "tie with",
        "worse": "worse than",
    }.items():
        names = [
            f"{line.row} ({line.mean(moved) - reference.mean(moved):+.1f})"
            for line in others
            if compare(line, reference, moved) == verdict
        ]
        if names:
            found.append(f"{word} {reference.row}: {', '.join(names)}")
    return f"Images {where}: {'; '.join(found)}."


def markdown_table(lines: Sequence[Line]) -> str:
    """Returns the final table."""
    cheapest = min(line.cost.step for line in lines)
    head = "| | top-1 | moved by 1 | moved by 2 | top-5 | parameters | MACs (M) | time per step |"
    rows = [
        f"| {line.row} | "
        + " | ".join(f"{line.mean(m):.1f} ± {line.spread(m):.1f}" for m in MOVES)
        + f" | {statistics.mean(r.top5 for r in line.results):.1f} | {line.cost.parameters:,} | "
        f"{line.cost.macs / 1e6:.2f} | {1e3 * line.cost.step:.0f} ms "
        f"({line.cost.step / cheapest:.2f}x) |"
        for line in lines
    ]
    return "\n".join([head, "| --- |" + " --- |" * 7, *rows])


def write_report(directory: Path, title: str, lines: Sequence[Line], cells: Sequence[Cell]) -> None:
    """Writes report.md, results.json and the figures.

    Args:
        directory: Where to.
        title: The heading.
        lines: The final table.
        cells: The runs behind it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    config = cells[0].config
    settings = {
        **dataclasses.asdict(config), "encoding": "by row", "absolute": "by row", "seed": "by cell",
    }  # fmt: skip
    content = {
        "title": title,
        "rows": [_as_json(line) for line in lines],
        "sentences": sentences(lines),
        "settings": settings,
        "versions": _versions(),
    }
    write_text(directory / "results.json", json.dumps(content, indent=2) + "\n")
    for name, figure in _figures(lines, cells).items():
        save_figure(figure, directory / f"{name}.png")
    body = [
        f"# {title}",
        "\n".join(f"- {sentence}" for sentence in sentences(lines)),
        markdown_table(lines),
        "Mean over the seeds ± half the distance between the best and the worst seed. Moved: each "
        "image shifted right, down, left or up by whole patches, black where nothing is known.",
        "![Top-1 of each row](top1.png)",
        "![The curves of the first seed](curves.png)",
        f"{config.epochs} epochs, batch {config.batch_size}, learning rate {config.lr}, the same "
        f"for every row; data: {config.data}; {_versions_text()}.",
    ]
    write_text(directory / "report.md", "\n\n".join(body) + "\n")


def _paired(line: Line, other: Line, moved: int) -> tuple[float, float]:
    """Returns the mean difference in percent, image by image, and its standard error."""

    def rates(of: Line) -> torch.Tensor:
        hits = [[int(digit) for digit in result.hits[moved]] for result in of.results]
        return torch.tensor(hits, dtype=torch.float64).mean(0)

    differences = 100 * (rates(line) - rates(other))
    return differences.mean().item(), differences.std().item() / math.sqrt(len(differences))


def _as_json(line: Line) -> dict[str, Any]:
    return {
        "row": line.row,
        "top1": [line.mean(moved) for moved in MOVES],
        "spread": [line.spread(moved) for moved in MOVES],
        "seeds": [
            {"seed": r.seed, "top1": [r.top1(m) for m in MOVES], "top5": r.top5}
            for r in line.results
        ],
        **dataclasses.asdict(line.cost),
    }


def _figures(lines: Sequence[Line], cells: Sequence[Cell]) -> dict[str, Any]:
    from irpe.viz import plot_scores, plot_training, read_metrics

    scores = {
        line.row: [[result.top1(moved) for result in line.results] for moved in MOVES]
        for line in lines
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


def _versions_text() -> str:
    return ", ".join(f"{name} {value}" for name, value in _versions().items())
