"""Files that are whole or not there: checkpoints of a run, and the room they need."""

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

_FORMAT = 1


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file beside its place and moves it there once all of it is on the disk.

    Args:
        path: Its place.
        write: Writes the content.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    write_whole(path, lambda file: file.write(text.encode()))


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Writes a checkpoint: tensors, numbers, texts, and lists and dicts of them."""
    try:
        write_whole(path, lambda file: torch.save({"format": _FORMAT, **state}, file))
    except (OSError, RuntimeError) as error:
        raise OSError(
            f"the checkpoint {path} could not be written: {error}; the one before is untouched"
        ) from error


def read_torch(path: Path) -> Any:
    """Returns the tensors, numbers and texts in a file of torch's; nothing in it is executed."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, OSError, KeyError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise ValueError(f"{path} is damaged or holds more than tensors: {reason}") from error


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Returns what `save_checkpoint` wrote; nothing in the file is executed."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: the run has no checkpoint")
    state = read_torch(path)
    if not isinstance(state, dict) or state.get("format") != _FORMAT:
        raise ValueError(f"{path} is no checkpoint that this release reads")
    return state


def check_room(directory: Path, num_bytes: int) -> None:
    """Makes a directory and raises an error unless files of a size can be written to it.

    Args:
        directory: The directory.
        num_bytes: The size of one checkpoint; while one is replaced, two are there.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OSError(
            f"{directory} cannot be written to: {error}; choose another --output"
        ) from None
    free = shutil.disk_usage(directory).free
    if free < 2 * num_bytes:
        raise OSError(
            f"{directory} has room for {free / 1e6:.0f} MB, two checkpoints of this run need "
            f"{2 * num_bytes / 1e6:.0f} MB: free some, or choose another --output"
        )
