"""Checkpoints of a run, and the disk space they need."""

import reprlib
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from irpe.errors import MissingFileError, UserError, UserFileError
from irpe.files import check_zip, warn_unchecked, write_whole

_FORMAT = 1


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint: tensors, numbers, strings, and lists and dicts of them."""
    try:
        write_whole(path, lambda file: torch.save({"format": _FORMAT, **state}, file))
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserFileError(
            f"the checkpoint {path} could not be written: {reason}; the previous one is untouched"
        ) from error


def read_torch(path: Path) -> Any:
    """Returns the tensors, numbers and strings in a torch file; nothing in it is executed."""
    has_checksums = check_zip(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch meets damage in many ways
        raise UserError(
            f"{path} is damaged, or holds more than tensors, numbers and strings "
            f"({type(error).__name__})"
        ) from error
    if not has_checksums:
        warn_unchecked(path)
    return content


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Returns what `save_checkpoint` wrote; nothing in the file is executed."""
    if not path.is_file():
        raise MissingFileError(f"{path} does not exist: the run has no checkpoint")
    state = read_torch(path)
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise UserError(f"{path} is not a checkpoint that this release reads")
    state = {"implementations": {}} | state  # a run from before these were kept had none to keep
    for name, is_valid in _FIELDS.items():
        if name not in state or not is_valid(state[name]):
            found = reprlib.repr(state[name]) if name in state else "missing"
            raise UserError(
                f"{path} is damaged: its {name!r} is {found}; restore it from a copy, or train "
                "again in another directory"
            )
    return state


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in value.items()
    )


def _is_table(value: Any) -> bool:
    """Tells whether a value is the table of epochs: a dict of numbers for each."""
    return isinstance(value, list) and all(
        isinstance(row, dict)
        and {"epoch", "train_loss"} <= set(row)
        and all(isinstance(name, str) and _is_number(cell) for name, cell in row.items())
        for row in value
    )


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("state"), dict)
        and all(isinstance(state, dict) for state in value["state"].values())
        and isinstance(value.get("param_groups"), list)
        and all(isinstance(group, dict) for group in value["param_groups"])
    )


# What a checkpoint holds.
_FIELDS: dict[str, Callable[[Any], bool]] = {
    "model": _are_tensors,
    "average": lambda value: value is None or _are_tensors(value),
    "optimizer": _is_optimizer,
    "scaler": lambda value: value is None or isinstance(value, dict),
    "epoch": _is_count,
    "step": _is_count,
    "sum_of_losses": _is_number,
    "history": _is_table,
    "broken": lambda value: isinstance(value, list) and all(map(_is_count, value)),
    "implementations": lambda value: (
        isinstance(value, dict)
        and all(isinstance(text, str) for item in value.items() for text in item)
    ),
}


def check_disk_space(directory: Path, num_bytes: int) -> None:
    """Makes a directory, or raises an error if files of a size cannot be written to it.

    Args:
        directory: The directory.
        num_bytes: The size of one checkpoint; while one is replaced, two exist.
    """
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    try:
        _check_disk_space(directory, num_bytes)
    except OSError:
        for each in made:
            with suppress(OSError):
                each.rmdir()
        raise


def _check_disk_space(directory: Path, num_bytes: int) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserFileError(
            f"{directory} cannot be written to: {error.strerror}; choose another --output"
        ) from None
    free = shutil.disk_usage(directory).free
    if free < 2 * num_bytes:
        raise UserFileError(
            f"{directory} has {free / 1e6:.0f} MB left, two checkpoints of this run need "
            f"{2 * num_bytes / 1e6:.0f} MB: free some space, or choose another --output"
        )
