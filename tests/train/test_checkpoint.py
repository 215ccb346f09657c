"""Checkpoints are whole or not there, and never run code."""

import os
import pickle
import random
import resource

import pytest
import torch

from irpe.files import read_torch
from irpe.train.run import Run

STATE = {
    "model": {},
    "average": None,
    "optimizer": {"state": {}, "param_groups": []},
    "scaler": None,
    "epoch": 1,
    "step": 0,
    "sum_of_losses": 0.0,
    "history": [{"epoch": 1, "train_loss": 1.5}],
    "broken": [],
}


def test_round_trip(tmp_path):
    state = {**STATE, "model": {"a": torch.randn(3)}, "epoch": 3}
    Run(tmp_path).save_checkpoint(state)
    read = Run(tmp_path).checkpoint()
    assert torch.equal(read["model"]["a"], state["model"]["a"])
    assert read["history"] == [{"epoch": 1, "train_loss": 1.5}]
    assert (read["epoch"], read["scaler"]) == (3, None)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_full_disk_is_named(tmp_path):
    Run(tmp_path).save_checkpoint(STATE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written.*the previous one is untouched"):
            Run(tmp_path).save_checkpoint({"epoch": 2, "model": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert Run(tmp_path).checkpoint()["epoch"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_with_code_in_it_runs_nothing(tmp_path):
    torch.save({"format": 1, "model": Evil(tmp_path / "ran")}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="damaged, or holds more than tensors"):
        Run(tmp_path).checkpoint()
    (tmp_path / "p.pt").write_bytes(pickle.dumps(Evil(tmp_path / "ran"), protocol=2))
    with pytest.raises(ValueError, match="damaged, or holds more than tensors"):
        read_torch(tmp_path / "p.pt")
    assert not (tmp_path / "ran").exists()


def test_a_truncated_checkpoint(tmp_path):
    Run(tmp_path).save_checkpoint({"model": {"a": torch.randn(1000)}})
    content = (tmp_path / "checkpoint.pt").read_bytes()
    (tmp_path / "checkpoint.pt").write_bytes(content[:1000])
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged: File is not a zip file"):
        Run(tmp_path).checkpoint()


def test_a_flipped_bit_is_an_error_or_changes_nothing(tmp_path):
    path = tmp_path / "checkpoint.pt"
    expected = torch.randn(200)
    Run(tmp_path).save_checkpoint({**STATE, "model": {"a": expected}})
    whole = path.read_bytes()
    draw, refused = random.Random(0), []
    for _ in range(40):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            state = Run(tmp_path).checkpoint()
        except ValueError as error:
            refused.append(str(error))
        else:
            assert torch.equal(state["model"]["a"], expected)
    assert len(refused) > 10
    assert all(str(path) in message for message in refused)


def test_a_file_of_an_old_torch_is_read_with_a_warning(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.warns(UserWarning, match=r"a\.pt has no checksum"):
        assert torch.equal(read_torch(tmp_path / "a.pt")["a"], torch.ones(2))


@pytest.mark.parametrize("content", ["text", 3, ["a"], None])
def test_a_checkpoint_that_holds_something_else(tmp_path, content):
    torch.save(content, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="is not a checkpoint that this release reads"):
        Run(tmp_path).checkpoint()
    (tmp_path / "checkpoint.pt").write_text(f"{content} in plain")
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged, or holds more than tensors"):
        Run(tmp_path).checkpoint()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    run = Run(tmp_path / "file" / "run")
    with pytest.raises(OSError, match="cannot be written to"), run.locked():
        pass
