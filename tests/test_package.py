"""The package as a whole: what importing it costs, and what its tools say of it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAVY = [
    "torch._dynamo", "torch._inductor", "timm", "transformers", "torchvision", "accelerate",
    "matplotlib", "scipy", "onnx", "onnxruntime", "typer", "rich",
]  # fmt: skip


def run(*command):
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)


def test_import_loads_torch_and_nothing_heavier_and_says_nothing():
    code = f"import sys, irpe; print([m for m in {HEAVY} if m in sys.modules])"
    done = run(sys.executable, "-W", "error", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_every_public_name_is_documented():
    import irpe

    assert all(getattr(irpe, name).__doc__ for name in irpe.__all__)


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "ruff", "check"],
        [sys.executable, "-m", "ruff", "format", "--check"],
        [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable],
        [str(Path(sys.executable).parent / "lint-imports")],
    ],
    ids=["ruff check", "ruff format", "pyright", "import-linter"],
)
def test_tools_have_nothing_to_say(command):
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
