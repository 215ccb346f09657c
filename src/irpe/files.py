"""Files that are written whole or not at all, and safetensors files that may be damaged."""

import hashlib
import json
import os
import secrets
import stat
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from irpe.errors import FolderError, MissingFileError, UserError, UserFileError

if TYPE_CHECKING:
    from torch import Tensor

_LONGEST = 60  # characters of a cleaned name
_CHECKSUM, _SHA256 = "irpe.sha256", "sha256"  # of safetensors, of JSON
_ZIP = b"PK\x03\x04"  # the first bytes of a zip file
# What the standard library raises for a zip file with a damaged directory.
_NOT_A_ZIP = (
    zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError, OSError,
    OverflowError, RuntimeError, ValueError,
)  # fmt: skip


def clean_name(text: str) -> str:
    """Returns a text as a part of a file's name, of letters, digits and hyphens."""
    return "".join(c if c.isalnum() else "-" for c in text)[:_LONGEST].strip("-")


def free_name(path: Path, *parts: str) -> Path:
    """Returns the path of nothing yet, beside another one.

    Args:
        path: The other one.
        *parts: What is added to its name. Without any, or if that exists too, a number is.
    """
    path = path.absolute() if not path.name else path  # the name of "." is empty
    named = path.with_name("-".join([path.name, *map(clean_name, parts)]))
    numbered = (named.with_name(f"{named.name}-{index}") for index in count(2))
    return next(each for each in chain([named], numbered) if not each.exists())


def write_whole(
    path: Path, write: Callable[[BinaryIO], object], *, like: Path | None = None
) -> None:
    """Writes a file beside its path and moves it there once all of it is on the disk.

    What is replaced keeps its mode and, where that is permitted, its owner and group.

    Args:
        path: The file; a symbolic link is followed.
        write: Writes the content.
        like: An existing file whose mode, owner and group a new file takes.
    """
    target = _target(path)
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    with _errors_about(path):
        old = next((each.stat() for each in (target, like) if each and each.is_file()), None)
        mode = 0o666 if old is None else stat.S_IMODE(old.st_mode)
        try:
            # The system takes the umask off the mode: no more than the old mode at any moment.
            with open(hidden, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                write(file)
                file.flush()
                if old is not None and os.name == "posix":
                    with suppress(PermissionError):  # only root may give a file away
                        os.chown(hidden, old.st_uid, old.st_gid)
                    os.chmod(hidden, mode)
                os.fsync(file.fileno())
            move(hidden, path)
        finally:
            hidden.unlink(missing_ok=True)


def move(source: Path, path: Path) -> None:
    """Replaces a file, or what it links to, with another one of the same folder."""
    target = _target(path)
    with _errors_about(path):
        os.replace(source, target)
        if os.name != "posix":
            return
        directory = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


@contextmanager
def locked(path: Path) -> Generator[None]:
    """Holds a lock against other processes and threads; waits for the one that holds it.

    The system releases it when its process ends, however that ends. Where a file system refuses
    locks, there is a warning.

    Args:
        path: The lock's own file, which exists while the lock is held.
    """
    with ExitStack() as stack:
        while True:
            with _errors_about(path.parent):
                file = stack.enter_context(path.open("wb"))
            try:
                import fcntl

                fcntl.flock(file, fcntl.LOCK_EX)
            except (ImportError, OSError) as error:
                warnings.warn(
                    f"{path.parent} cannot be locked ({error}): write to it from one process at a "
                    "time",
                    stacklevel=4,
                )
                break
            with suppress(FileNotFoundError):  # who held it before has removed the file
                if os.path.samestat(path.stat(), os.fstat(file.fileno())):
                    break
        stack.callback(path.unlink, missing_ok=True)
        yield


def write_bytes(path: Path, content: bytes, *, like: Path | None = None) -> None:
    """Writes a file, whole or not at all."""
    write_whole(path, lambda file: file.write(content), like=like)


def write_text(path: Path, text: str, *, like: Path | None = None) -> None:
    """Writes a text file, whole or not at all."""
    write_bytes(path, text.encode(), like=like)


def to_safetensors(tensors: "Mapping[str, Tensor]") -> bytes:
    """Returns a safetensors file with a checksum of its tensors, which the format itself lacks."""
    import safetensors.torch

    return safetensors.torch.save(dict(tensors), {_CHECKSUM: tensor_checksum(tensors)})


def read_safetensors(path: Path) -> "dict[str, Tensor]":
    """Returns the tensors of a safetensors file by name, or raises an error that names the file.

    The checksum of a file that `to_safetensors` made is checked; one without gives a warning. A
    file that is replaced while it is read, which happens in several steps, is read again.
    """
    while True:
        before = version_of(path)
        try:
            return _read_safetensors(path)
        except (UserError, RuntimeError):
            if version_of(path) == before:
                raise


def version_of(path: Path) -> tuple[int, int]:
    """Returns what tells whether a file was replaced since."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _read_safetensors(path: Path) -> "dict[str, Tensor]":
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            expected = (file.metadata() or {}).get(_CHECKSUM)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error}") from error
    if expected is None:
        warn_unchecked(path)
    elif expected != tensor_checksum(tensors):
        raise UserError(f"{path} is damaged: its tensors do not have the checksum of the file")
    return tensors


def is_ours(path: Path) -> bool:
    """Returns whether a file is one that `to_safetensors` made, by its header alone."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return _CHECKSUM in (file.metadata() or {})
    except (SafetensorError, OSError):
        return False


def tensor_checksum(tensors: "Mapping[str, Tensor]") -> str:
    """Returns a checksum of names, types, shapes and elements."""
    import torch

    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        digest.update(data.numpy().data)
    return digest.hexdigest()


def to_json(content: Mapping[str, Any]) -> str:
    """Returns an object as JSON with a checksum of the rest as its last field."""
    return json.dumps({**content, _SHA256: _json_checksum(content)}, indent=2) + "\n"


def check_json(content: Mapping[str, Any], path: Path) -> None:
    """Raises an error if an object that `to_json` wrote was changed; one without gives a warning.

    Args:
        content: The object, as it was read.
        path: Where it was read.
    """
    rest = {name: value for name, value in content.items() if name != _SHA256}
    if _SHA256 not in content:
        warn_unchecked(path)
    elif content[_SHA256] != _json_checksum(rest):
        raise UserError(
            f"{path} is not as it was written: restore it, or, if you changed it yourself, remove "
            f"{_SHA256!r} from it"
        )


def check_zip(path: Path) -> bool:
    """Returns whether a file is a zip file; its checksums, which torch ignores, must be right.

    Files that torch wrote before 1.6 are not zip files and have no checksums. One that begins like
    a zip file is one, be its directory damaged: torch would still read it.
    """
    try:
        if not _begins_as_zip(path) and not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as file:
            wrong = file.testzip()
    except _NOT_A_ZIP as error:
        raise UserError(f"{path} is damaged: {error}") from error
    if wrong is not None:
        raise UserError(f"{path} is damaged: the checksum of {wrong} is wrong")
    return True


def _begins_as_zip(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_ZIP)) == _ZIP
    except OSError:
        return False  # whoever reads it says why


def warn_unchecked(path: Path) -> None:
    """Warns that a file was read that has no checksum."""
    warnings.warn(f"{path} has no checksum: damage would not be noticed", stacklevel=4)


def check_regular(path: "str | os.PathLike[str]") -> None:
    """Raises an error for a FIFO, a socket or a device, which reading could wait for forever."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise UserError(f"{path} is not a regular file, but a folder, FIFO, socket or device")


def read_torch(path: Path) -> Any:
    """Returns the tensors, numbers and strings in a torch file; nothing in it is executed."""
    import torch

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


def check_writable(path: Path) -> None:
    """Raises an error if no file can be written there, before anything is computed."""
    _target(path)


def _target(path: Path) -> Path:
    """Returns the file to replace: the path, or what it links to if that is a regular file."""
    if path.is_dir():
        raise FolderError(f"{path} is a folder: name a file")
    target = Path(os.path.realpath(path))
    if not path.is_file() and (path.exists() or target.is_symlink()):
        raise UserFileError(
            f"{path} is a device, a FIFO, a socket or a link to itself: name a file"
        )
    folder = target.parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise MissingFileError(f"the folder {folder} does not exist: make it first")
    return target


@contextmanager
def _errors_about(path: Path) -> Generator[None]:
    """Lets errors of the system name a file, not the hidden one that is written first."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def _json_checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
