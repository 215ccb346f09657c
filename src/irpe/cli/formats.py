"""What a command found, as a table, as markdown or as JSON, on the screen or in a file."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

_WIDTH = 79


class Format(StrEnum):
    """How a report is written."""

    table = "table"
    markdown = "markdown"
    json = "json"


def format_facts(facts: Mapping[str, str]) -> list[str]:
    """Returns lines for each fact: its name, then its text."""
    width = max(map(len, facts))
    return [
        line
        for name, text in facts.items()
        for line in wrap(text, f"{name:<{width}}  ", " " * (width + 2)) or [name]
    ]


def wrap(text: str, first: str = "", other: str = "") -> list[str]:
    """Returns a text as lines for a terminal, whose words (paths, options) stay whole.

    Args:
        text: The text.
        first: What the first line begins with.
        other: What the other lines begin with.
    """
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=other,
        break_long_words=False,
        break_on_hyphens=False,
    )


@dataclass(frozen=True)
class Report:
    """Rows of text for people, and the values behind them for programs.

    Args:
        title: What the rows show.
        columns: Their headings; the first column is text, the others are numbers.
        rows: One text for each column.
        notes: What there is to say about them.
        values: The dataclasses that the rows were made from.
        conditions: What the values depend on.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str]
    values: Sequence[Any]
    conditions: dict[str, Any]

    def text(self, form: Format) -> str:
        """Returns the report in a format."""
        match form:
            case Format.table:
                return self._table()
            case Format.markdown:
                return self._markdown()
            case Format.json:
                return self._json()

    def _table(self) -> str:
        cells = [self.columns, *self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(
                cell.rjust(width) if number else cell.ljust(width)
                for number, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in cells
        ]
        notes = [line for note in self.notes for line in wrap(note)]
        return "\n".join([self.title, "", *lines, "", *notes])

    def _markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = ["| " + " | ".join(row) + " |" for row in (self.columns, rule, *self.rows)]
        return "\n".join([self.title, "", *lines, "", *(f"- {note}" for note in self.notes)])

    def _json(self) -> str:
        values = [asdict(value) for value in self.values]
        return json.dumps({**self.conditions, "rows": values}, indent=2)
