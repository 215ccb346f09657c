"""The report of an ablation: an answer, a table, and sentences that claim no more than the data."""

import dataclasses
import json
import platform
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch

import irpe
from irpe.ablation.answer import answer, changed_settings, find_reference
from irpe.ablation.cells import AblationConfig, Cell
from irpe.ablation.results import Measure
from irpe.ablation.statistics import RowResult, compare, difference
from irpe.ablation.tuning import SEEDS, SearchResult, search_as_json, tuning_table
from irpe.files import write_text
from irpe.train.runs import read_metrics
from irpe.viz import plot_scores, plot_training, save_figure

_VERDICTS = {"better": "better than", "tie": "tie with", "worse": "worse than"}
_SEEDS = (
    "Mean over the seeds ± half the distance between the best and the worst seed, in brackets the "
    "standard error over the test images"
)
_MOVED = (
    "Moved: each image shifted right, down, left or up by whole patches, black where nothing is "
    "known."
)
_COLUMNS = (
    "Effect: how much the attention's output changes without the encoding. Step: CPU time of a "
    "training step, one thread, relative to the fastest row."
)
_SEARCH = (
    "The search for learning rates, as multiples of the model's: {} on held-out training images{}, "
    f"means of {SEEDS} seeds. The best{{}} was chosen; no test image was used. Other rows have "
    "nothing to search a rate for."
)


@dataclass(frozen=True)
class AblationReport:
    """All that is reported of an ablation.

    Args:
        title: The heading.
        recipe: The recipe that every cell trained.
        rows: The results by row.
        cells: The runs behind them.
        facts: What was run, by the name of each fact.
        failures: What to say of cells that failed.
        searches: The search for the rates of tables, by row, where there was one.

    Examples:
        >>> import irpe.ablation
        >>> report = irpe.ablation.ablate(ablation)  # doctest: +SKIP
        >>> print(*report.answer())  # doctest: +SKIP
    """

    title: str
    recipe: str
    rows: Sequence[RowResult]
    cells: Sequence[Cell]
    facts: dict[str, str]
    failures: Sequence[str] = ()
    searches: Sequence[SearchResult] = ()

    @property
    def config(self) -> AblationConfig:
        """The budget of every cell."""
        return self.cells[0].config

    def answer(self) -> list[str]:
        """Returns what to do, and what failed."""
        settings = changed_settings(self.config, self.recipe, bool(self.searches))
        return [*self.failures, *answer(self.rows, self.recipe, self.config.data, settings)]

    def write(self, directory: Path) -> None:
        """Writes report.md, results.json and the figures to a folder."""
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / "results.json", json.dumps(self.as_json(), indent=2) + "\n")
        for name, figure in self._figures().items():
            save_figure(figure, directory / f"{name}.png")
        write_text(directory / "report.md", self.as_markdown())

    def as_markdown(self) -> str:
        """Returns the report as text."""
        versions = ", ".join(f"{name} {value}" for name, value in _versions().items())
        measure = self.rows[0].measure
        parts = [
            f"# {self.title}",
            "\n".join(f"- {line}" for line in self.answer()),
            markdown_table(self.rows),
            legend(measure),
            "\n".join(f"- {sentence}" for sentence in sentences(self.rows)),
            *([_search(measure), tuning_table(self.searches)] if self.searches else []),
            "\n".join(f"- {name}: {text}" for name, text in self.facts.items()),
            f"The same budget for every row; {versions}. Figures beside this file: "
            f"`{measure.key}.png`, `curves.png`; all values: `results.json`.",
        ]
        return "\n\n".join(parts) + "\n"

    def as_json(self) -> dict[str, Any]:
        """Returns all values, for json."""
        settings = {
            **dataclasses.asdict(self.config),
            "encoding": "by row", "absolute": "by row", "seed": "by cell",
            **{result.search.field: "by row" for result in self.searches},
        }  # fmt: skip
        return {
            "title": self.title,
            "answer": self.answer(),
            "rows": [_row_as_json(row) for row in self.rows],
            "sentences": sentences(self.rows),
            "search": [search_as_json(result) for result in self.searches],
            "facts": self.facts,
            "settings": settings,
            "versions": _versions(),
        }

    def _figures(self) -> dict[str, Any]:
        measure = self.rows[0].measure
        scores = {
            row.name: [[result.score(shift) for result in row.results] for shift in measure.shifts]
            for row in self.rows
        }
        errors = {row.name: [row.error(shift) for shift in measure.shifts] for row in self.rows}
        names = {row.name for row in self.rows}
        first = {c.row.name: c for c in reversed(self.cells) if (c.directory / _TABLE).is_file()}
        runs = {name: read_metrics(first[name].directory) for name in names if name in first}
        drawn = plot_scores(scores, errors, measure.name)
        return {measure.key: drawn, "curves": plot_training(runs)}


_TABLE = "metrics.csv"


def _search(measure: Measure) -> str:
    """Returns what the table of a search shows."""
    moves = "".join(f" / moved by {shift}" for shift in measure.shifts[1:])
    is_moved = len(measure.shifts) > 1
    shown = f" as they are{moves}" if is_moved else ""
    return _SEARCH.format(measure.name, shown, " as they are" if is_moved else "")


def sentences(rows: Sequence[RowResult]) -> list[str]:
    """Returns what the data does and does not support, compared with one row, in plain words."""
    reference = find_reference(rows)
    others = [row for row in rows if row is not reference and not row.is_idle]
    count, shifts = len(reference.results[0].values()), reference.measure.shifts
    seeds = min(len(row.results) for row in rows)
    text = [
        f"{count:,} test images, {seeds} seed{'s' * (seeds > 1)}. Two rows differ only if every "
        "seed of one beats every seed of the other and the difference is more than twice its "
        "standard error over the test images (the number after ± below); all else is called a tie."
    ]
    if seeds < 2:
        text.append("One seed: how much seeds differ is not known, so no difference is claimed.")
    return text + [_comparison(others, reference, s) for s in shifts if seeds > 1 and others]


def _comparison(others: Sequence[RowResult], reference: RowResult, shift: int) -> str:
    moved = f"Images moved by {shift} patch{'es' * (shift > 1)}"
    where = moved if shift else reference.measure.unmoved
    found: list[str] = []
    for verdict, words in _VERDICTS.items():
        names = [
            f"{row.name} ({difference(row, reference, shift)})"
            for row in others
            if compare(row, reference, shift) == verdict
        ]
        if names:
            found.append(f"{words} {reference.name}: {', '.join(names)}")
    return f"{where}: {'; '.join(found)}."


def markdown_table(rows: Sequence[RowResult]) -> str:
    """Returns the final table."""
    cheapest = min(row.cost.step for row in rows)
    measure = rows[0].measure
    moved = [f"moved by {shift}" for shift in measure.shifts[1:]]
    costs = ["effect", "parameters", "MACs (M)", "step"]
    head = ["", measure.name, *moved, measure.second_name, *costs]
    lines = [
        f"| {row.name} | "
        + " | ".join(row.text(shift) for shift in measure.shifts)
        + f" | {statistics.mean(r.second for r in row.results):.1f} | {effect_text(row)} | "
        f"{row.cost.parameters:,} | {row.cost.macs / 1e6:.2f} | {1e3 * row.cost.step:.0f} ms "
        f"({row.cost.step / cheapest:.2f}x) |"
        for row in rows
    ]
    heading = "|" + "|".join(f" {name} " if name else " " for name in head) + "|"
    return "\n".join([heading, "| --- |" + " ---: |" * (len(head) - 1), *lines])


def legend(measure: Measure) -> str:
    """Returns what the columns of the table are."""
    if len(measure.shifts) > 1:
        return f"{_SEEDS}. {_MOVED} {_COLUMNS}"
    return f"{measure.name} in percent: {_SEEDS} (jackknife). {_COLUMNS}"


def effect_text(row: RowResult) -> str:
    """Returns the effect of a row's encoding; nothing where it has none."""
    return "" if row.effect is None else f"{row.effect:.1%}" + (" (!)" if row.is_idle else "")


def _row_as_json(row: RowResult) -> dict[str, Any]:
    measure = row.measure
    return {
        "row": row.name,
        "encoding": row.row.encoding,
        "absolute": row.row.absolute,
        "rates": dict(row.row.rates),
        measure.key: [row.mean(shift) for shift in measure.shifts],
        "spread": [row.spread(shift) for shift in measure.shifts],
        "error": [row.error(shift) for shift in measure.shifts],
        "effect": row.effect,
        "seeds": [
            {
                "seed": r.seed,
                measure.key: [r.score(shift) for shift in measure.shifts],
                measure.second_key: r.second,
            }
            for r in row.results
        ],
        **dataclasses.asdict(row.cost),
    }


def _versions() -> dict[str, Any]:
    return {
        "irpe": irpe.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "processor": platform.processor() or platform.machine(),
    }
