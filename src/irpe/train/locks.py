"""The lock of a run's directory: one process trains in it at a time.

It is a POSIX record lock, which the system releases when its process ends, however it ends; forked
workers do not inherit it. Across nodes it holds as far as the shared file system passes such locks
on: NFS does (version 3 with lockd), Lustre if it is mounted with `flock`. Where a file system
refuses locks, there is a warning.
"""

import os
import socket
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from irpe.errors import UserError

LOCK = ".lock"
_locked = set[Path]()  # by this process, which its own record locks do not stop


@contextmanager
def lock_run(directory: Path) -> Generator[None]:
    """Holds the lock of a run, or raises an error that names the process that holds it.

    Args:
        directory: The run's directory, which exists.
    """
    if os.name != "posix":
        warnings.warn(f"{directory} is not locked: start no second run in it", stacklevel=2)
        yield
        return
    path = (directory / LOCK).resolve()
    if path in _locked:
        raise _in_use(directory, "this process")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _locked.add(path)
    try:
        _acquire(file, directory)
        yield
    finally:
        _locked.discard(path)
        os.close(file)  # which releases it


def _acquire(file: int, directory: Path) -> None:
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        raise _in_use(directory, holder) from None
    except OSError as error:
        warnings.warn(
            f"{directory} cannot be locked ({error.strerror}): start no second run in it",
            stacklevel=2,
        )
        return
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _in_use(directory: Path, holder: str) -> UserError:
    return UserError(
        f"{directory} is in use by a run that is alive ({holder}): wait until it ends, stop it, or "
        "choose another --output"
    )
