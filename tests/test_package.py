"""The package as a whole: what importing it costs, and what its tools say of it."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAVY = [
    "torch._dynamo", "torch._inductor", "timm", "transformers", "torchvision", "accelerate",
    "matplotlib", "scipy", "onnx", "onnxruntime", "rich",
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


@pytest.mark.parametrize("name", ["irpe.train.train", "irpe.ablation.ablate"])
def test_a_name_that_needs_an_extra_says_which(name):
    package = name.rpartition(".")[0]
    code = f"import sys; sys.modules['accelerate'] = None; import {package}; {name}"
    done = run(sys.executable, "-c", code)
    assert done.stderr.endswith("accelerate is not installed: pip install 'irpe[train]'\n")


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
