"""The Triton kernels compile to machine code for GPUs that are not here."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pairs import text

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which PyTorch brings"
)


def compile_variants(path, *indices):
    command = [sys.executable, "-m", "benchmarks.triton", "--output", str(path)]
    command += ["--index", *map(str, indices)] if indices else []
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())["results"]["rows"]


def check(row):
    assert "error" not in row, row["error"]
    has_values = "v" in row["targets"]
    kernels = {"forward", "query", "key"} | ({"value"} if has_values else set())
    assert set(row["kernels"]) == kernels | ({"mask"} if row["mask"] == "learned" else set())
    for found in row["kernels"].values():
        assert found["registers"] > 0
        assert found["shared bytes"] <= (64 if row["gpu"] == "gfx942" else 99) * 1024  # it has
        if row["dtype"] != "float32" and row["dim"] <= 64:
            assert found["spills in loops"] == 0


def test_few_kernels_compile(tmp_path):
    rows = compile_variants(tmp_path / "triton.json", 3, 7)
    assert [row["gpu"] for row in rows] == ["sm_90", "gfx942"]
    for row in rows:
        check(row)


@pytest.mark.slow
def test_kernels_of_every_pair_of_factors_compile(tmp_path):
    rows = compile_variants(tmp_path / "triton.json")
    failures = []
    for row in rows:
        try:
            check(row)
        except AssertionError as error:
            name = text({key: value for key, value in row.items() if key != "kernels"})
            failures.append(f"{name}: {error}")
    assert not failures, "\n".join(failures)


def test_what_is_stored_is_what_the_command_makes():
    stored = json.loads((ROOT / "benchmarks" / "results" / "triton.json").read_text())
    for row in stored["results"]["rows"]:
        check(row)
