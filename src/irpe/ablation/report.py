"""The report of an ablation: an answer, a table, and sentences that claim no more than the data."""

import base64
import dataclasses
import html
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from irpe.ablation.answer import Answer, answer, changed_settings, comparable, find_reference
from irpe.ablation.cells import At, Cell
from irpe.ablation.statistics import RowResult, common_sizes, compare, digits_of, unmoved
from irpe.ablation.tuning import SEEDS, Search, tuning_table
from irpe.ablation.verdicts import Difference
from irpe.errors import UserError
from irpe.files import write_text
from irpe.train.config import RunConfig
from irpe.train.run import read_metrics
from irpe.viz import plot_scores, plot_training, save_figure

_VERDICTS = {"better": "better than", "tie": "tie with", "worse": "worse than"}
_SEEDS = (
    "Mean over the seeds ± half the distance between the best and the worst seed, in brackets the "
    "standard error over the test images"
)
_MOVED = (
    "Moved: each image shifted right, down, left or up by whole patches; grey images leave black, "
    "those with colours their reflection."
)
_COLUMNS = (
    "Effect: how much the attention's output changes without the encoding. Step: CPU time of a "
    "training step, one thread, in turns before the cells ran, relative to the fastest row."
)
_SEARCH = (
    "The search for learning rates, as multiples of the model's: {} on held-out training images{}, "
    f"means of {SEEDS} seeds. The best was chosen; no test image was used. Other rows have nothing "
    "to search a rate for."
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

    In a notebook it shows itself as a table and a figure.

    Examples:
        >>> import irpe.ablation
        >>> report = irpe.ablation.AblationReport("An example", "laptop", [], [], {})
        >>> report.table()
        []
        >>> report = irpe.ablation.ablate(ablation)  # doctest: +SKIP
        >>> print(report.answer().headline)  # doctest: +SKIP
        >>> pandas.DataFrame(report.table())  # doctest: +SKIP
        >>> report.compare("K", "absolute").verdict  # doctest: +SKIP
    """

    title: str
    recipe: str
    rows: Sequence[RowResult]
    cells: Sequence[Cell]
    facts: dict[str, str]
    failures: Sequence[str] = ()
    searches: Sequence[Search] = ()

    @property
    def config(self) -> RunConfig:
        """The budget of every cell."""
        return self.cells[0].config

    def answer(self) -> Answer:
        """Returns what to do."""
        settings = changed_settings(self.config, self.recipe, bool(self.searches))
        return answer(self.rows, self.recipe, self.config.data, settings)

    def lines(self) -> list[str]:
        """Returns what to do and what failed, the most useful sentence first."""
        first, *others = self.answer().lines()
        return [first, *self.failures, *others]

    def table(self) -> list[dict[str, Any]]:
        """Returns a flat dictionary for each row, seed and shift of the test images."""
        return [
            {
                "row": row.name,
                "encoding": row.row.encoding,
                "absolute": row.row.absolute,
                **dict(row.row.rates),
                "seed": result.seed,
                "shift": shift,
                **result.score(shift).details,
                "effect": result.effect,
                "parameters": row.cost.parameters,
                "macs": row.cost.macs,
                "step": row.cost.step,
                "seconds": result.seconds,
                **result.machine,
            }
            for row in self.rows
            for result in row.results
            for shift in row.shifts
        ]

    def compare(self, row: str, other: str, shift: int = 0) -> Difference:
        """Returns how much better a row is than another one, by their names, as a value."""
        return compare(self._row(row), self._row(other), shift)

    def figure(self) -> Any:
        """Returns a matplotlib figure of the scores: a point for each seed."""
        scores = {row.name: [row.scores(shift) for shift in row.shifts] for row in self.rows}
        errors = {row.name: [row.error(shift) or 0.0 for shift in row.shifts] for row in self.rows}
        return plot_scores(scores, errors, self.rows[0].measure.name)

    def _repr_html_(self) -> str:
        """Returns a table and a figure, for notebooks."""
        lines = [map(html.escape, line) for line in table_lines(self.rows)]
        rows = "".join(f"<tr><td>{'</td><td>'.join(line)}</td></tr>" for line in lines)
        words = "".join(f"<li>{html.escape(line)}</li>" for line in self.lines())
        image = io.BytesIO()
        self.figure().savefig(image, format="png")
        picture = base64.b64encode(image.getvalue()).decode()
        return f'<table>{rows}</table><ul>{words}</ul><img src="data:image/png;base64,{picture}">'

    def _row(self, name: str) -> RowResult:
        names = [row.name for row in self.rows]
        if name not in names:
            raise UserError(f"row {name!r} is not one of {', '.join(names)}")
        return self.rows[names.index(name)]

    def write(self, directory: Path) -> None:
        """Writes report.md, results.json and the figures to a folder."""
        directory.mkdir(parents=True, exist_ok=True)
        write_text(directory / "results.json", json.dumps(self.as_json(), indent=2) + "\n")
        measure = self.rows[0].measure
        first = {cell.row.name: cell.directory for cell in reversed(self.cells)}
        runs = {
            row.name: read_metrics(first[row.name])
            for row in self.rows if (first[row.name] / "metrics.csv").is_file()
        }  # fmt: skip
        save_figure(self.figure(), directory / f"{measure.key}.png")
        save_figure(plot_training(runs, measure), directory / "curves.png")
        write_text(directory / "report.md", self.as_markdown())

    def as_markdown(self) -> str:
        """Returns the report as text."""
        machine = self.rows[0].results[0].machine
        versions = ", ".join(f"{name} {value}" for name, value in machine.items())
        moves = "".join(f" / moved by {shift}" for shift in self.rows[0].shifts[1:])
        measure = self.rows[0].measure
        search = _SEARCH.format(measure.name, f" as they are{moves}" if moves else "")
        parts = [
            f"# {self.title}",
            _bullets(self.lines()),
            markdown_table(self.rows),
            legend(self.rows[0]),
            _bullets(sentences(self.rows)),
            *([search, tuning_table(self.searches)] if self.searches else []),
            _bullets(f"{name}: {text}" for name, text in self.facts.items()),
            f"The same budget for every row; {versions}. Figures beside this file: "
            f"`{measure.key}.png`, `curves.png`; all values: `results.json`.",
        ]
        return "\n\n".join(parts) + "\n"

    def as_json(self) -> dict[str, Any]:
        """Returns all values, for json."""
        settings = {
            **dataclasses.asdict(self.config),
            "encoding": "by row", "absolute": "by row", "seed": "by cell",
            **{search.field: "by row" for search in self.searches},
        }  # fmt: skip
        return {
            "title": self.title,
            "answer": self.lines(),
            "choice": self.answer().choice,
            "rows": [_row_as_json(row) for row in self.rows],
            "sentences": sentences(self.rows),
            "search": [search.as_json() for search in self.searches],
            "facts": self.facts,
            "settings": settings,
            "versions": dict(self.rows[0].results[0].machine),
        }


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def sentences(rows: Sequence[RowResult]) -> list[str]:
    """Returns what the data does and does not support, compared with one row, in plain words."""
    reference = find_reference(rows)
    others = [row for row in comparable(rows) if row is not reference]
    count = reference.results[0].scores[0].num_images
    seeds = min(len(row.results) for row in rows)
    about = (
        f"{count:,} test images, {seeds} seed{'s' * (seeds > 1)}. The number after ± is half the "
        "95 % interval of a difference, over seeds and test images together. Rows differ where it "
        "leaves 0 out, as one comparison in twenty does by chance alone. All else is called a tie."
    )
    if seeds < 2:
        return [about, "One seed: how much seeds differ is not known, so no difference is claimed."]
    if reference.is_at_chance:
        text = f"{reference.name} has not left chance, so that nothing is compared with it."
        return [about, text]
    conditions = (*reference.shifts, *common_sizes([reference, *others])) if others else ()
    return [about, *(_comparison(others, reference, at) for at in conditions)]


def _comparison(others: Sequence[RowResult], reference: RowResult, at: At) -> str:
    if isinstance(at, str):
        where = f"At {at} pixels"
    else:
        where = f"Images moved by {at} patch{'es' * (at > 1)}" if at else unmoved(reference)
    digits = reference.digits
    judged = {row.name: compare(row, reference, at) for row in others}
    found: list[str] = []
    for verdict, words in _VERDICTS.items():
        alike = {name: each for name, each in judged.items() if each.verdict == verdict}
        if alike:
            names = ", ".join(f"{name} ({each.text(digits)})" for name, each in alike.items())
            found.append(f"{words} {reference.name}: {names}")
    return f"{where}: {'; '.join(found)}."


def markdown_table(rows: Sequence[RowResult]) -> str:
    """Returns the final table."""
    head, *lines = table_lines(rows)
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, rule, *lines))


def table_lines(rows: Sequence[RowResult], is_whole: bool = True) -> list[list[str]]:
    """Returns the headings of the final table and a line for each row; narrow unless whole."""
    cheapest, first = min(row.cost.step for row in rows), rows[0]
    seconds = first.results[0].scores[0].measures[1:2] if is_whole else ()
    moved = [f"moved by {shift}" if is_whole else f"moved {shift}" for shift in first.shifts[1:]]
    costs = ["parameters", "MACs (M)", "ms"] if is_whole else []
    lines = [["", first.measure.name, *moved, *(m.name for m in seconds), "effect", "step", *costs]]
    for row in rows:
        found = [result.scores[0].details for result in row.results]
        beside = [f"{fmean(of[m.key] for of in found):.{digits_of(m)}f}" for m in seconds]
        effect = "" if row.effect is None else f"{row.effect:.1%}" + (" (!)" if row.is_idle else "")
        cost = row.cost
        costs = [f"{cost.parameters:,}", f"{cost.macs / 1e6:.2f}", f"{1e3 * cost.step:.0f}"]
        lines.append([
            row.name, *map(row.text, row.shifts), *beside, effect, f"{cost.step / cheapest:.2f}x",
            *(costs if is_whole else []),
        ])  # fmt: skip
    return lines


def legend(row: RowResult) -> str:
    """Returns what the columns of the table are."""
    unit = " in percent" if row.measure.unit == "%" else ""
    if len(row.shifts) > 1:
        return f"{row.measure.name}{unit}: {_SEEDS}. {_MOVED} {_COLUMNS}"
    return f"{row.measure.name}{unit}: {_SEEDS}. {_COLUMNS}"


def _of_images(values: Sequence[float]) -> str | list[float]:
    """Returns the value of each test image; right and wrong as a text of 1 and 0."""
    if set(values) <= {0.0, 100.0}:
        return "".join("01"[value > 0] for value in values)
    return [round(value, 4) for value in values]


def _row_as_json(row: RowResult) -> dict[str, Any]:
    key = row.measure.key
    return {
        "row": row.name,
        "encoding": row.row.encoding,
        "absolute": row.row.absolute,
        "rates": dict(row.row.rates),
        key: [row.mean(shift) for shift in row.shifts],
        "spread": [row.spread(shift) for shift in row.shifts],
        "error": [row.error(shift) for shift in row.shifts],
        "effect": row.effect,
        "chance": row.chance,
        "seeds": [
            {
                **result.scores[0].details,
                "seed": result.seed,
                key: [score.value for score in result.scores],
                "images": [_of_images(score.values) for score in result.scores],
                "seconds": result.seconds,
                "machine": dict(result.machine),
            }
            for result in row.results
        ],
        **dataclasses.asdict(row.cost),
    }
