"""How the kernels are built: with a compiler or without, stale or new, for old systems."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from irpe.ops.impl.native import build, library

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(build.why_not() is not None, reason=f"{build.why_not()}")


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    """Also where the tests run with the kernels switched off."""
    monkeypatch.delenv("IRPE_NATIVE", raising=False)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Lets `library.load` look into an empty folder."""
    real = build.library_path
    monkeypatch.setattr(build, "library_path", lambda width, to=tmp_path: real(width, to))
    for cached in (library.load, library.why_unavailable):
        cached.cache_clear()
    yield tmp_path
    for cached in (library.load, library.why_unavailable):
        cached.cache_clear()


def width():
    return torch.backends.cpu.get_cpu_capability()


def test_no_library_is_no_error(fresh):
    assert "no compiled kernels" in library.why_unavailable()


@needs_compiler
@pytest.mark.skipif(width() not in build.WIDTHS, reason="no kernels for this processor")
def test_a_library_of_other_sources_is_not_used(fresh):
    build.compile_library(width(), fresh, ["-UIRPE_HASH", '-DIRPE_HASH="older"'])
    assert "reinstall" in library.why_unavailable()


@pytest.mark.skipif(width() not in build.WIDTHS, reason="no kernels for this processor")
def test_a_library_that_is_none_is_not_used(fresh):
    build.library_path(width(), fresh).write_text("no library")
    assert "reinstall" in library.why_unavailable()


def test_the_version_says_what_is_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "library_path", lambda width: tmp_path / width)
    assert "no compiled kernels" in build.installed()
    for name in build.WIDTHS:
        (tmp_path / name).write_bytes(b"older")
    assert "reinstall" in build.installed()
    for name in build.WIDTHS:
        (tmp_path / name).write_bytes(build.source_hash().encode())
    assert "AVX2 and AVX512" in build.installed()
    monkeypatch.setenv("IRPE_NATIVE", "0")
    assert "switched off" in build.installed()


def test_the_hash_is_that_of_sources_and_layout(monkeypatch, tmp_path):
    here = shutil.copytree(build.HERE, tmp_path / "native")
    monkeypatch.setattr(build, "HERE", here)
    seen = {build.source_hash()}
    for name in ("kernel/attention.cpp", "kernel/call.h", "layout.py"):
        path = here / name
        path.write_text(path.read_text() + "\n")
        seen.add(build.source_hash())
    assert len(seen) == 4


def test_without_a_compiler_nothing_is_compiled_and_what_is_old_goes(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    old = build.library_path("AVX2", tmp_path)
    old.write_text("old")
    assert "compiler" in build.compile_all(tmp_path)
    assert not old.exists()


def test_a_compiler_that_fails_is_no_error(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", shutil.which("false"))
    assert build.compile_all(tmp_path).startswith("no compiled kernels: ")
    assert not list(tmp_path.iterdir())


@needs_compiler
@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_it_needs_nothing_but_an_old_libc(compiler, monkeypatch, tmp_path):
    if not shutil.which(compiler) or not shutil.which("objdump"):
        pytest.skip(f"needs {compiler} and objdump")
    monkeypatch.setenv("CXX", compiler)
    for name in build.WIDTHS:
        path = build.compile_library(name, tmp_path)
        shown = subprocess.run(["objdump", "-p", path], capture_output=True, text=True, check=True)
        words = shown.stdout.split()
        needed = [words[i + 1] for i, word in enumerate(words) if word == "NEEDED"]
        versions = [word for word in words if word.startswith("GLIBC")]
        assert set(needed) <= {"libc.so.6", "ld-linux-x86-64.so.2"}
        assert versions
        assert all(tuple(map(int, v.split("_")[1].split("."))) <= (2, 17) for v in versions)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", build.WIDTHS)
def test_the_sanitizers_find_nothing(name, tmp_path):
    """All tests of this folder and many random calls, with AddressSanitizer and UBSan."""
    if width() not in build.WIDTHS or (name == "AVX512" and width() != name):
        pytest.skip(f"this processor has no {name}")
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g"]
    build.compile_library(name, tmp_path, flags)
    compiler = build.find_compiler()
    libraries = [
        subprocess.run([compiler, f"-print-file-name={n}"], capture_output=True, text=True).stdout
        for n in ("libasan.so", "libubsan.so")
    ]
    program = f"""
import sys, pathlib, pytest
sys.path.insert(0, {str(HERE.parents[1])!r})
from hostile import native
from hostile.cases import run
from irpe.ops.impl.native import build, library
real = build.library_path
build.library_path = lambda width: real(width, pathlib.Path({str(tmp_path)!r}))
assert library.why_unavailable() is None, library.why_unavailable()
found = run(native.cases(2, 1000))
assert found.cases == 1000 and not found.failures, found.failures[:3]
tests = {str(HERE / "test_native.py")!r}
quiet = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
sys.exit(pytest.main(["-n", "0", "-q", "-x", *quiet, tests]))
"""
    environment = os.environ | {
        "LD_PRELOAD": " ".join(x.strip() for x in libraries),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "ATEN_CPU_CAPABILITY": name.lower(),
    }
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env=environment, cwd=HERE.parents[2],
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


@needs_compiler
@pytest.mark.slow
def test_valgrind_finds_nothing(tmp_path):
    """The kernels in a program of their own; valgrind knows AVX2 and no AVX-512."""
    if not shutil.which("valgrind"):
        pytest.skip("needs valgrind")
    flags = ["-std=c++17", "-O1", "-g", f"-march={build.WIDTHS['AVX2']}", '-DIRPE_HASH=""']
    sources = [f"-I{build.HERE / 'kernel'}", HERE / "driver.cpp", "-o", tmp_path / "driver"]
    subprocess.run([build.find_compiler(), *flags, *sources], check=True)
    checks = ["valgrind", "--quiet", "--error-exitcode=9", "--leak-check=full"]
    done = subprocess.run([*checks, tmp_path / "driver"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
