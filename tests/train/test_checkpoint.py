"""Checkpoints are whole or not there, and never run code."""

import os
import pickle
import random
import resource

import pytest
import torch

from irpe.train.checkpoint import check_disk_space, load_checkpoint, read_torch, save_checkpoint

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
    save_checkpoint(tmp_path / "c.pt", state)
    read = load_checkpoint(tmp_path / "c.pt")
    assert torch.equal(read["model"]["a"], state["model"]["a"])
    assert read["history"] == [{"epoch": 1, "train_loss": 1.5}]
    assert (read["epoch"], read["scaler"]) == (3, None)
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


def test_a_full_disk_is_named(tmp_path):
    save_checkpoint(tmp_path / "c.pt", STATE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"could not be written.*the previous one is untouched"):
            save_checkpoint(tmp_path / "c.pt", {"epoch": 2, "model": torch.zeros(100_000)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_checkpoint(tmp_path / "c.pt")["epoch"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_a_checkpoint_with_code_in_it_runs_nothing(tmp_path):
    torch.save({"format": 1, "model": Evil(tmp_path / "ran")}, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="damaged, or holds more than tensors"):
        load_checkpoint(tmp_path / "c.pt")
    (tmp_path / "p.pt").write_bytes(pickle.dumps(Evil(tmp_path / "ran"), protocol=2))
    with pytest.raises(ValueError, match="damaged, or holds more than tensors"):
        load_checkpoint(tmp_path / "p.pt")
    assert not (tmp_path / "ran").exists()


def test_a_truncated_checkpoint(tmp_path):
    save_checkpoint(tmp_path / "c.pt", {"model": {"a": torch.randn(1000)}})
    content = (tmp_path / "c.pt").read_bytes()
    (tmp_path / "c.pt").write_bytes(content[:1000])
    with pytest.raises(ValueError, match=r"c\.pt is damaged: File is not a zip file"):
        load_checkpoint(tmp_path / "c.pt")


def test_a_flipped_bit_is_an_error_or_changes_nothing(tmp_path):
    path = tmp_path / "c.pt"
    expected = torch.randn(200)
    save_checkpoint(path, {**STATE, "model": {"a": expected}})
    whole = path.read_bytes()
    draw, refused = random.Random(0), []
    for _ in range(300):
        flipped = bytearray(whole)
        flipped[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(flipped)
        try:
            state = load_checkpoint(path)
        except ValueError as error:
            refused.append(str(error))
        else:
            assert torch.equal(state["model"]["a"], expected)
    assert len(refused) > 100
    assert all(str(path) in message for message in refused)


def test_a_file_of_an_old_torch_is_read_with_a_warning(tmp_path):
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    with pytest.warns(UserWarning, match=r"a\.pt has no checksum"):
        assert torch.equal(read_torch(tmp_path / "a.pt")["a"], torch.ones(2))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "text"),
        ("model", {"a": "text"}),
        ("model", {3: torch.zeros(1)}),
        ("average", [1]),
        ("optimizer", None),
        ("optimizer", {"state": {0: "text"}, "param_groups": []}),
        ("scaler", 3),
        ("epoch", -1),
        ("epoch", "1"),
        ("epoch", True),
        ("step", 1.5),
        ("sum_of_losses", None),
        ("history", None),
        ("history", [None]),
        ("history", [{"epoch": "1", "train_loss": 1.0}]),
        ("broken", [-1]),
        ("broken", None),
    ],
)
def test_states_of_wrong_types_are_refused(tmp_path, field, value):
    path = tmp_path / "c.pt"
    save_checkpoint(path, {**STATE, field: value})
    with pytest.raises(ValueError, match=rf"c\.pt is damaged: its '{field}' is .*restore it"):
        load_checkpoint(path)
    save_checkpoint(path, {name: value for name, value in STATE.items() if name != field})
    with pytest.raises(ValueError, match=f"its '{field}' is missing"):
        load_checkpoint(path)


def test_implementations_are_names_or_missing(tmp_path):
    """They were not stored at first."""
    path = tmp_path / "c.pt"
    save_checkpoint(path, {**STATE, "implementations": {"a call": 1}})
    with pytest.raises(ValueError, match="its 'implementations' is"):
        load_checkpoint(path)
    save_checkpoint(path, STATE)
    assert load_checkpoint(path)["implementations"] == {}


@pytest.mark.parametrize("content", ["text", 3, ["a"], None])
def test_a_checkpoint_that_holds_something_else(tmp_path, content):
    torch.save(content, tmp_path / "c.pt")
    with pytest.raises(ValueError, match="is not a checkpoint that this release reads"):
        load_checkpoint(tmp_path / "c.pt")
    (tmp_path / "c.pt").write_text(f"{content} in plain")
    with pytest.raises(ValueError, match=r"c\.pt is damaged, or holds more than tensors"):
        load_checkpoint(tmp_path / "c.pt")


def test_a_directory_without_room(tmp_path):
    with pytest.raises(OSError, match="two checkpoints of this run need"):
        check_disk_space(tmp_path, 10**18)


def test_a_disk_without_space_gets_no_folders(tmp_path):
    with pytest.raises(OSError, match="MB left"):
        check_disk_space(tmp_path / "runs" / "laptop", 10**18)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written to"):
        check_disk_space(tmp_path / "file" / "run", 1)
