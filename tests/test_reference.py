"""The reference shows every public name, each with an example that runs, and the site builds."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import irpe
import irpe.ablation
import irpe.profile
import irpe.train
import irpe.viz

ROOT = Path(__file__).parents[1]
PACKAGES = (irpe, irpe.ablation, irpe.profile, irpe.train, irpe.viz)
NAMES = [f"{package.__name__}.{name}" for package in PACKAGES for name in package.__all__]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_that_runs(name):
    pytest.importorskip("timm", reason="needs the extra 'timm'")
    package, _, last = name.rpartition(".")
    value = getattr(sys.modules[package], last)
    (found,) = doctest.DocTestFinder(recurse=False).find(value, name)
    lines = [each for each in found.examples if not each.options.get(doctest.SKIP)]
    assert any(not each.source.startswith(("import ", "from ")) for each in lines)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS).run(found, out=report.append)
    assert not report, "".join(report)


def test_the_reference_shows_every_public_name_once():
    pages = "".join(path.read_text() for path in (ROOT / "docs/reference").glob("*.md"))
    shown = re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    assert sorted(shown) == sorted(NAMES)


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("material", reason="needs the extra 'docs'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, "--site-dir", tmp_path],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    pages = {path.relative_to(tmp_path) for path in tmp_path.rglob("*.html")}
    assert Path("reference/commands/index.html") in pages
    outside = re.compile(r'(?:src|href)="https?://(?!arxiv\.org|zensical)[^"]+"')
    loaded = [m for p in pages for m in outside.findall((tmp_path / p).read_text())]
    assert not [m for m in loaded if m.startswith("src=") or ".css" in m or ".js" in m]
