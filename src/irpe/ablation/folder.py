"""The folder of an ablation: named after its data and rows, and for one ablation only."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from irpe.ablation.rows import AblationRow
from irpe.errors import UserError
from irpe.files import clean_name, free_name, write_text
from irpe.train.config import RunConfig

FILE = "ablation.json"  # what the folder is for
_ABOUT = "about.json"  # what the report says beside the results
_OF_ROWS = ("encoding", "absolute", "seed", "sha256")


def default_folder(data: str, rows: str) -> Path:
    """Returns where an ablation of data and named rows is stored if the user names no folder."""
    return Path("runs") / clean_name(f"ablation-{Path(data).name}-{rows}")


def claim_folder(
    directory: Path,
    rows: Sequence[AblationRow],
    base: RunConfig,
    data: Sequence[Any],
    is_tuned: bool = False,
) -> None:
    """Writes what a folder is for, or raises an error if it is for another ablation.

    The number of seeds may differ: more seeds continue an ablation. `data` are the sources of the
    images to train on and to evaluate on.
    """
    settings = json.loads(base.replace(encoding="none", absolute="keep", seed=0).to_json())
    own: dict[str, Any] = {
        **{name: value for name, value in settings.items() if name not in _OF_ROWS},
        "rows": [[row.name, row.encoding, row.absolute] for row in rows],
        "images": [len(source) for source in data],
        "names of classes": list(data[0].classes),
        **({"tune": True} if is_tuned else {}),
    }
    path = directory / FILE
    if not path.is_file():
        directory.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(own, indent=1) + "\n")
        return
    found = _read(path)
    names = [name for name in {**own, **found} if own.get(name) != found.get(name)]
    if names:
        raise UserError(
            f"{directory} holds another ablation, which differs in {', '.join(names)}: choose "
            f"another --output, as in -o {free_name(directory)}"
        )


def write_about(directory: Path, about: dict[str, Any]) -> None:
    """Writes what the report says beside the results."""
    write_text(directory / _ABOUT, json.dumps(about, indent=1) + "\n")


def read_about(directory: Path) -> dict[str, Any]:
    """Returns what the report says beside the results; nothing before it has begun."""
    path = directory / _ABOUT
    return _read(path) if path.is_file() else {}


def read_claim(directory: Path) -> dict[str, Any]:
    """Returns what a folder is for, or raises an error if it is not one of an ablation."""
    if not (directory / FILE).is_file():
        raise UserError(f"{directory} is not the folder of an ablation: it has no {FILE}")
    return _read(directory / FILE)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({error}): remove it, and start the same command again"
        ) from error
