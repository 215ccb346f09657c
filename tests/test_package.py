"""The package as a whole: what importing it costs, and what its tools say of it."""

import os
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


def test_import_loads_nothing_heavy_and_says_nothing():
    code = (
        f"import sys, irpe; irpe.__version__, dir(irpe); before = 'torch' in sys.modules; "
        f"irpe.equip; print([m for m in {HEAVY} if m in sys.modules], before)"
    )
    done = run(sys.executable, "-W", "error", "-c", code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[] False\n", "")


def test_every_public_name_is_documented():
    import irpe

    assert all(getattr(irpe, name).__doc__ for name in irpe.__all__)


def test_every_public_name_is_listed_and_loads():
    import irpe

    assert {*irpe.__all__} <= {*dir(irpe)}
    sources = [name for names in irpe._SOURCES.values() for name in names]
    assert sorted(sources) == sorted(irpe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'eqip'"):
        irpe.eqip  # noqa: B018


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "ruff", "check"],
        [sys.executable, "-m", "ruff", "format", "--check"],
        [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable],
        [str(Path(sys.executable).parent / "lint-imports")],
        [sys.executable, "-m", "deptry", "src"],
    ],
    ids=["ruff check", "ruff format", "pyright", "import-linter", "deptry"],
)
def test_tools_have_nothing_to_say(command):
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/*.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_files_for_publishing_have_their_form(schema, pattern):
    files = [str(path) for path in ROOT.glob(pattern)]
    assert files
    tool = str(Path(sys.executable).parent / "check-jsonschema")
    done = run(tool, "--builtin-schema", f"vendor.{schema}", *files)
    assert done.returncode == 0, done.stdout + done.stderr


ALONE = """
import sys, torch, irpe
attention = irpe.RPEAttention(32, num_heads=2, spec="product-contextual-qkv", num_prefix_tokens=1)
assert attention(torch.randn(2, 1 + 3 * 5, 32), grid=(3, 5)).shape == (2, 16, 32)
layer = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)
model = irpe.equip(torch.nn.TransformerEncoder(layer, 2), "cross-bias-k", grid=(3, 5))
assert model(torch.randn(2, 15, 32)).shape == (2, 15, 32)
assert len(irpe.summary(model).attentions) == 2
irpe.save_equipped(model, sys.argv[1])
from irpe.train.runs import read_metrics
"""


@pytest.mark.slow
def test_the_core_works_in_an_environment_of_its_own(tmp_path):
    """Nothing but what pyproject declares as needed is installed."""
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python = str(tmp_path / "venv" / "bin" / "python")
    installed = run(python, "-m", "pip", "install", "--quiet", str(ROOT))
    if "No matching distribution" in installed.stderr:
        pytest.skip("needs an index of packages")
    assert installed.returncode == 0, installed.stderr
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", ALONE, str(tmp_path / "model")],
        capture_output=True, text=True, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
