"""Benchmarks measure what they are told, and write where they are told."""

import importlib
import sys
from pathlib import Path

import pytest

pytest.importorskip("timm", reason="needs the extra 'timm'")

REPORTING = [
    "attention", "decomposed", "detection", "implementations", "models", "overhead",
    "segmentation", "theirs", "triton",
]  # fmt: skip


@pytest.mark.parametrize("name", REPORTING)
def test_a_report_is_written_only_where_it_is_asked_for(name, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    module = importlib.import_module(f"benchmarks.{name}")
    written = []
    for words in ([], ["-o", str(tmp_path / "report.json")]):
        monkeypatch.setattr(sys, "argv", [name, *words])
        module.write_report(module.parse_arguments().output, {})
        written.append([file.name for file in tmp_path.iterdir()])
    assert written == [[], ["report.json"]]
