"""Files are written whole or not at all, and a damaged one is named."""

import pytest
import torch
from safetensors.torch import save_file

from irpe.files import check_writable, read_safetensors, write_text, write_whole


def test_a_failed_write_leaves_the_file_before(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")

    def fail(file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        write_whole(path, fail)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_is_replaced_and_has_the_usual_rights(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    rights = path.stat().st_mode
    write_text(path, "after")
    assert (path.read_text(), path.stat().st_mode) == ("after", rights)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_tensors_are_read_or_the_damaged_file_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.randn(3, 5)}
    save_file(tensors, path)
    assert torch.equal(read_safetensors(path)["a"], tensors["a"])
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged: "):
        read_safetensors(path)


def test_where_a_file_cannot_be_written(tmp_path):
    check_writable(tmp_path / "new")
    with pytest.raises(IsADirectoryError, match="is a folder: name a file"):
        check_writable(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist: make it first"):
        check_writable(tmp_path / "none" / "new")
