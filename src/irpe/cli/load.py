"""Models and runs that a command is pointed at."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from irpe.errors import MissingFileError, UserError
from irpe.train.config import RUN_FILE

if TYPE_CHECKING:
    from torch import nn

_CELL = re.compile(r"(.+)-\d+-[0-9a-f]{8}")  # the folder of an ablation's run: row, seed, key
_MODEL, _CELLS = "model", "cells"  # folders in a run, and in an ablation


def find_model(path: Path) -> Path:
    """Returns the folder of the run or saved model that is meant; torch is not needed to see it.

    Args:
        path: What the user gave: also the folder model of a run, which knows how images are
            prepared.
    """
    if not path.is_dir():
        raise MissingFileError(
            f"{path} is not a folder: pass the folder of a run, or of a model that "
            "irpe.save_equipped wrote"
        )
    if (path / _CELLS).is_dir():
        raise UserError(f"{path} is an ablation: name one of its runs, in {path / _CELLS}")
    if not (path / RUN_FILE).is_file() and (runs := sorted(path.glob(f"*/{RUN_FILE}"))):
        raise UserError(f"{path} is not a run, but holds runs: name one, as {runs[0].parent}")
    is_inside = path.name == _MODEL and (path.parent / RUN_FILE).is_file()
    return path.parent if is_inside else path


def load_model(path: Path) -> "nn.Module":
    """Returns the model of a training run or of `irpe.save_equipped`, in eval mode.

    Args:
        path: The folder of a run, or of a saved model.
    """
    path = find_model(path)
    if (path / RUN_FILE).is_file():
        from irpe.train.runs import load_run

        return load_run(path)
    from irpe.adapters.saving import load_equipped

    return load_equipped(path)


def label_of(run: Path) -> str:
    """Returns the name of a run: that of its row if it is one of an ablation, without the seed."""
    try:
        return str(json.loads((run / "result.json").read_text())["row"])
    except (OSError, ValueError, KeyError, TypeError):
        unfinished = _CELL.fullmatch(run.resolve().name)
        return unfinished[1] if unfinished else run.resolve().name
