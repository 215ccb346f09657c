"""What a command found, as a table, as markdown or as JSON, on the screen or in a file."""

import json
import os
import tempfile
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

_WIDTH = 79


class Format(StrEnum):
    """How a report is written."""

    table = "table"
    markdown = "markdown"
    json = "json"


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
        notes = [line for note in self.notes for line in textwrap.wrap(note, _WIDTH)]
        return "\n".join([self.title, "", *lines, "", *notes])

    def _markdown(self) -> str:
        rule = ["---", *["---:"] * (len(self.columns) - 1)]
        lines = ["| " + " | ".join(row) + " |" for row in (self.columns, rule, *self.rows)]
        return "\n".join([self.title, "", *lines, "", *(f"- {note}" for note in self.notes)])

    def _json(self) -> str:
        values = [asdict(value) for value in self.values]
        return json.dumps({**self.conditions, "rows": values}, indent=2)


def check_place(path: Path) -> None:
    """Raises an error if no file can be written there, before anything is computed."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory: name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} does not exist: make it first, or name another")


def write_text(path: Path, text: str) -> None:
    """Writes a file beside its place and moves it there: it is complete, or not there at all."""
    check_place(path)
    handle, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        os.chmod(scratch, 0o666 & ~_umask())
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
