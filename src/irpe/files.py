"""Files that are written whole or not at all, and safetensors files that may be damaged."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from torch import Tensor


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file beside its path and moves it there once all of it is on the disk.

    Args:
        path: The file.
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
    _sync_directory(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a file, whole or not at all."""
    write_whole(path, lambda file: file.write(content))


def write_text(path: Path, text: str) -> None:
    """Writes a text file, whole or not at all."""
    write_bytes(path, text.encode())


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Returns the tensors of a safetensors file by name, or raises an error that names the file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def check_writable(path: Path) -> None:
    """Raises an error if no file can be written there, before anything is computed."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"the folder {path.parent} does not exist: make it first")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _sync_directory(path: Path) -> None:
    if os.name != "posix":
        return
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
