"""What was proved and timed on this machine, in a file that all processes of a user share.

The file belongs to one environment: versions, driver and the source of the kernels. It is replaced
whole, under a lock; a damaged one counts as empty. Where nothing can be written, verdicts live as
long as the process.
"""

import hashlib
import json
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import filelock
import torch

from irpe.ops.proof.signature import version_of


@dataclass
class Verdict:
    """What is known about one candidate for one signature.

    Args:
        error: Why it failed; "" if it passed.
        worst: The largest error found, relative to PyTorch's own.
        where: Of which tensor.
        date: When it was proved.
    """

    error: str
    worst: float
    where: str
    date: str

    @property
    def passed(self) -> bool:
        """Whether the candidate may be used."""
        return not self.error


@dataclass
class Record:
    """What is known about one signature.

    Args:
        verdicts: For each candidate whether it passed.
        seconds: For each size class the seconds of each candidate that was timed; `None` for one
            that ran out of memory.
    """

    verdicts: dict[str, Verdict] = field(default_factory=dict[str, Verdict])
    seconds: dict[str, dict[str, float | None]] = field(
        default_factory=dict[str, dict[str, float | None]]
    )

    def update(self, other: "Record") -> None:
        """Takes over what another record knows."""
        self.verdicts.update(other.verdicts)
        for sizes, seconds in other.seconds.items():
            self.seconds.setdefault(sizes, {}).update(seconds)


Records = dict[str, Record]  # by the text of the signature


def cache_directory() -> Path | None:
    """Returns the directory of the user's caches of irpe, `None` where there is no home."""
    named = os.environ.get("IRPE_CACHE")
    if named:
        return Path(named)
    with suppress(RuntimeError):
        shared = os.environ.get("XDG_CACHE_HOME")
        return (Path(shared) if shared else Path.home() / ".cache") / "irpe"
    return None


def environment() -> dict[str, str]:
    """Returns everything that could change a verdict, but for the device."""
    native: Any = torch._C
    driver = str(native._cuda_getDriverVersion()) if torch.cuda.is_available() else ""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "cuda": str(torch.version.cuda or torch.version.hip or ""),
        "driver": driver,
        "source": _hash_of_source(),
    }


class VerdictFile:
    """The file of this environment.

    Args:
        directory: Where it is; `None` if nothing can be kept.
    """

    def __init__(self, directory: Path | None) -> None:
        self._environment = environment()
        name = f"proofs-{_digest(self._environment)[:12]}.json"
        self.path = None if directory is None else directory / name

    def read(self) -> Records:
        """Returns what the file says; nothing if it is missing, damaged or cannot be read."""
        if self.path is None:
            return {}
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            content = json.loads(self.path.read_text())
            if content["checksum"] == _digest(content["records"]):
                return {name: _record(kept) for name, kept in content["records"].items()}
        return {}

    def add(self, found: Records) -> str | None:
        """Adds records to the file; returns why that was not possible. Call it under the lock."""
        if self.path is None:
            return "there is no home directory"
        records = self.read()
        for name, record in found.items():
            records.setdefault(name, Record()).update(record)
        plain = {name: asdict(record) for name, record in records.items()}
        content = {"environment": self._environment, "records": plain, "checksum": _digest(plain)}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            new = self.path.with_suffix(f".{os.getpid()}.new")
            try:
                new.write_text(json.dumps(content, indent=1))
                os.replace(new, self.path)
            finally:
                new.unlink(missing_ok=True)
        except OSError as error:
            return str(error)
        return None

    @contextmanager
    def lock(self, seconds: float) -> Generator[bool]:
        """Holds the lock of the file; gives whether it was free within so many seconds.

        Where a lock is not possible, nobody else can see a verdict either, and it counts as held.
        """
        if self.path is None:
            yield True
            return
        lock = filelock.FileLock(self.path.with_suffix(".lock"))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=seconds)
        except filelock.Timeout:
            yield False
            return
        except (OSError, NotImplementedError):
            yield True
            return
        try:
            yield True
        finally:
            lock.release()


def _record(kept: dict[str, Any]) -> Record:
    verdicts = {name: Verdict(**verdict) for name, verdict in kept["verdicts"].items()}
    seconds = {str(size): dict(times) for size, times in kept["seconds"].items()}
    return Record(verdicts, seconds)


def _digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _hash_of_source() -> str:
    """Returns a hash of everything that a proof runs: the files of `irpe.ops`."""
    found, folder = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(folder.rglob("*.py")):
        found.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:16]
