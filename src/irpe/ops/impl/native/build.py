"""Compiles the kernels: one library for each vector width, of sources that need nothing but libc.

An installation compiles them by the build hook, and running this file does it in the source tree.
It knows neither torch nor the rest of the package.
"""

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
WIDTHS = {"AVX2": "x86-64-v3", "AVX512": "x86-64-v4"}  # what a processor can, and its -march
_FLAGS = (
    *("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"),
    *("-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-trapping-math"),
    *("-ffp-contract=fast", "-mprefer-vector-width=512", "-static-libgcc", "-Wl,--as-needed"),
)


def library_path(width: str, folder: Path = HERE) -> Path:
    """Returns where the library of a vector width is."""
    return folder / f"libirpe_{width.lower()}.so"


def source_hash() -> str:
    """Returns a hash of the sources and of the layout of the structures that Python passes."""
    digest = hashlib.sha256()
    for path in sorted([*HERE.glob("kernel/*"), HERE / "layout.py", HERE / "build.py"]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def why_not() -> str | None:
    """Returns why nothing is compiled here, or `None` if it can be."""
    if os.environ.get("IRPE_NATIVE") == "0":
        return "IRPE_NATIVE=0"
    if platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc":
        return f"there are kernels for x86-64 Linux with glibc, not for {platform.platform()}"
    return None if find_compiler() else "no C++ compiler (c++, g++ or clang++) was found"


def why_unusable(widths: Iterable[str] = WIDTHS) -> str | None:
    """Returns why the libraries of some widths cannot be used, or `None` if they can be."""
    if os.environ.get("IRPE_NATIVE") == "0":
        return "the compiled kernels are switched off by IRPE_NATIVE=0"
    paths = [library_path(width) for width in widths]
    if not all(path.exists() for path in paths):
        return "this installation has no compiled kernels"
    if not all(source_hash().encode() in path.read_bytes() for path in paths):
        return "the compiled kernels are older than their sources: reinstall irpe"
    return None


def installed() -> str:
    """Returns whether there are kernels that can be used, in words."""
    return why_unusable() or f"with compiled kernels for {' and '.join(WIDTHS)}"


def find_compiler() -> str | None:
    """Returns the C++ compiler: what the environment variable CXX names, or what is there."""
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"]
    return next((found for found in map(shutil.which, names) if found), None)


def compile_library(width: str, folder: Path = HERE, extra: Sequence[str] = ()) -> Path:
    """Compiles the library of a vector width into a folder; raises `OSError` where that fails."""
    compiler, path = find_compiler(), library_path(width, folder)
    made = path.with_suffix(f".{os.getpid()}")
    flags = [*_FLAGS, f"-march={WIDTHS[width]}", f'-DIRPE_HASH="{source_hash()}"', *extra]
    command = [compiler or "c++", *flags, str(HERE / "kernel" / "attention.cpp"), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        made.unlink(missing_ok=True)
        raise OSError(f"{' '.join(command)}\n{done.stderr}")
    made.replace(path)
    return path


def compile_all(folder: Path = HERE) -> str:
    """Compiles all libraries into a folder, or none; returns what was done, in a line."""
    reason = why_not()
    if reason is None:
        try:
            made = [compile_library(width, folder) for width in WIDTHS]
            return f"compiled {' and '.join(path.name for path in made)} with {find_compiler()}"
        except OSError as error:
            reason = f"compiling failed: {error}"
    for width in WIDTHS:
        library_path(width, folder).unlink(missing_ok=True)
    return f"no compiled kernels: {reason}"


if __name__ == "__main__":
    print(compile_all(), file=sys.stderr)
