"""Files that are written whole or not at all, and safetensors files that may be damaged."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from torch import Tensor


def write_whole(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Writes a file beside its path and moves it there once all of it is on the disk.

    Args:
        path: The file; a symbolic link is followed.
        write: Writes the content.
    """
    write_together({path: write})


def write_together(contents: Mapping[Path, Callable[[BinaryIO], object]]) -> None:
    """Writes files, each whole or not at all; none is replaced before all are on the disk.

    Args:
        contents: What writes the content of each file; symbolic links are followed.
    """
    written: dict[str, Path] = {}
    try:
        for path, write in contents.items():
            with _errors_about(path):
                target = _target(path)
                handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
                written[name] = target
                with os.fdopen(handle, "wb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(name, 0o666 & ~_umask())
        for path, (name, target) in zip(contents, written.items(), strict=True):
            with _errors_about(path):
                os.replace(name, target)
    finally:
        for name in written:
            Path(name).unlink(missing_ok=True)
    for folder in {target.parent for target in written.values()}:
        _sync_directory(folder)


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
    _target(path)


def _target(path: Path) -> Path:
    """Returns the file to replace: the path, or what it links to if that is a regular file."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file")
    target = Path(os.path.realpath(path))
    if not path.is_file() and (path.exists() or target.is_symlink()):
        raise OSError(f"{path} is a device, a FIFO, a socket or a link to itself: name a file")
    folder = target.parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise FileNotFoundError(f"the folder {folder} does not exist: make it first")
    return target


@contextmanager
def _errors_about(path: Path) -> Iterator[None]:
    """Lets errors of the system name a file, not the hidden one that is written first."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


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
