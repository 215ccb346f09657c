"""`irpe convert`: files in, equipped models out, errors in one line."""

import os
import sys

import pytest
import timm
import torch
from models.test_published import TINY, authors_file

import irpe
import irpe.models
from irpe.cli.main import main

pytest.importorskip("rich", reason="needs the extra 'cli'")


def run(monkeypatch, *arguments):
    """Runs the program in this process; returns what it exits with."""
    monkeypatch.setattr(sys, "argv", ["irpe", "convert", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "80")
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    return 0


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("convert") / f"{TINY}.pth"
    authors_file(path, timm.create_model(TINY))
    return path


def test_a_file_becomes_an_equipped_model(file, tmp_path, monkeypatch, capsys):
    assert run(monkeypatch, file, "-o", tmp_path / "tiny") == 0
    out, err = capsys.readouterr()
    assert "product-contextual-k@1.9 in 12 attentions" in out
    assert err == ""
    loaded, expected = irpe.load_equipped(tmp_path / "tiny"), irpe.load_published(file)
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    x = torch.randn(1, 3, 224, 224)
    assert torch.equal(loaded(x), expected(x))


def test_errors_are_one_line_and_leave_nothing(file, tmp_path, monkeypatch):
    other, place = tmp_path / "other.pth", tmp_path / "place"
    os.link(file, other)
    for arguments, message in (
        ((other,), "'other'"),
        ((other, "--model", TINY.replace("_k", "_q")), TINY.replace("_k", "_q")),
        ((file.parent / "none.pth",), "none.pth"),
        ((__file__,), __file__),
    ):
        error = run(monkeypatch, *arguments, "-o", place)
        assert error.startswith("irpe: ")
        assert message in error
        assert "\n" not in error
        assert not place.exists()
    place.mkdir()
    (place / "precious").touch()
    assert str(place) in run(monkeypatch, file, "-o", place)
    assert os.listdir(place) == ["precious"]


def test_other_files_stay_and_links_are_followed(file, tmp_path, monkeypatch):
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    for _ in range(2):
        assert run(monkeypatch, file, "-o", tmp_path / "link") == 0
        (tmp_path / "target" / "notes").write_text("mine")
    assert (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(tmp_path / "target")) == ["irpe.json", "model.safetensors", "notes"]
