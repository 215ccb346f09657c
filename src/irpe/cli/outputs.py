"""Where a new run goes: a folder of its own, or an error with a name that is free."""

import json
import os
from pathlib import Path
from typing import Any

from irpe.errors import UserError
from irpe.files import free_name
from irpe.train.config import RUN_FILE, RunConfig


def check_output(directory: Path, config: RunConfig) -> None:
    """Raises an error if a folder is taken, which says by what, and names one that is free.

    A run never moves to another folder by itself: the processes of `torchrun` would have to agree
    on it, and a command that is given again after Ctrl-C would start anew without a word.

    Args:
        directory: The folder.
        config: The run that is to go there.
    """
    if os.environ.get("RANK", "0") != "0" or not any(directory.glob("[!.]*")):
        return  # the first process alone writes to it
    found = _read_settings(directory)
    if found is None:
        raise UserError(
            f"{directory} has files of others: choose a new folder, -o {free_name(directory)}"
        )
    own = config.with_absolute_paths()
    differing = {
        name: Path(str(getattr(own, name))).name
        for name in ("data", "encoding")
        if found.get(name) != getattr(own, name)
    }
    of = f" with other settings ({' and '.join(differing)})" if differing else ""
    raise UserError(
        f"{directory} holds a run{of}: go on with that one, --resume {directory}, or choose "
        f"another folder, -o {free_name(directory, *differing.values())}"
    )


def _read_settings(directory: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads((directory / RUN_FILE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError):
        return None
