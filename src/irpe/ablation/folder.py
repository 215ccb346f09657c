"""The folder of an ablation: named after its data and rows, and for one ablation only."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from irpe.ablation.rows import AblationRow
from irpe.errors import UserError
from irpe.files import clean_name, free_name, write_text
from irpe.train.config import RunConfig

FILE = "ablation.json"  # what the folder is for


class ClassedImages(Protocol):
    """Images of some classes."""

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes."""
        ...

    def __len__(self) -> int: ...


def default_folder(data: str, rows: str) -> Path:
    """Returns where an ablation is stored if the user names no folder.

    Args:
        data: The data, as in a configuration.
        rows: What the rows are called together.
    """
    return Path("runs") / clean_name(f"ablation-{Path(data).name}-{rows}")


def claim_folder(
    directory: Path,
    rows: Sequence[AblationRow],
    base: RunConfig,
    data: tuple[ClassedImages, ClassedImages],
    is_tuned: bool = False,
) -> None:
    """Writes what a folder is for, or raises an error if it is for another ablation.

    The number of seeds may differ: more seeds continue an ablation.

    Args:
        directory: The folder.
        rows: What is compared.
        base: The budget of every cell.
        data: The images to train on, and those to evaluate on.
        is_tuned: Whether the rates of tables are searched.
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


class Claim(NamedTuple):
    """What a folder is for.

    Args:
        rows: What is compared.
        base: The budget of every cell.
        is_tuned: Whether the rates of tables are searched.
        settings: All of it but the rows, as the file has it.
    """

    rows: list[AblationRow]
    base: Any
    is_tuned: bool
    settings: dict[str, Any]


def find_claim(directory: Path) -> Path:
    """Returns the file that says what a folder is for, or raises an error if there is none."""
    path = directory / FILE
    if not path.is_file():
        raise UserError(f"{directory} is not the folder of an ablation: it has no {FILE}")
    return path


def read_claim(directory: Path) -> Claim:
    """Returns what a folder is for, or raises an error if it is not one of an ablation."""
    content = _read(find_claim(directory))
    rows = [AblationRow(*row) for row in content.pop("rows")]
    settings = {name: value for name, value in content.items() if name not in _BESIDE}
    from irpe.train.config import find_task  # here, because it brings torch

    fields: dict[str, Any] = {**settings, "encoding": "none", "absolute": "keep", "seed": 0}
    config: Any = find_task(fields.pop("task")).Config
    return Claim(rows, config(**fields), content.get("tune", False), {"tune": False, **content})


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{path} is damaged ({error}): remove {path.parent}, or choose another --output"
        ) from error


_BESIDE = ("images", "names of classes", "tune")  # beside the fields of a configuration
_OF_ROWS = ("encoding", "absolute", "seed", "sha256")
