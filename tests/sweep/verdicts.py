"""Verdicts that outlive the process which found them: a sweep of hours can be interrupted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Verdicts:
    """What was found of each model, in a file of a line each.

    Args:
        file: The file, which may exist already; `None` remembers nothing.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file = file
        lines = file.read_text().splitlines() if file is not None and file.exists() else []
        self.found: dict[str, Any] = dict(map(json.loads, lines))

    def of(self, name: str, judge: Callable[[], Any]) -> Any:
        """Returns what was found of a model, and finds it if it is new."""
        if name not in self.found:
            self.found[name] = judge()
            if self.file is not None:
                with self.file.open("a") as file:
                    file.write(json.dumps([name, self.found[name]]) + "\n")
        return self.found[name]
