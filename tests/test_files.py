"""Files are written whole or not at all, and a damaged one is named."""

import os
import stat
import threading
import time

import pytest
import torch
from safetensors.torch import save_file

from irpe.files import (
    check_writable,
    locked,
    read_safetensors,
    to_safetensors,
    write_bytes,
    write_text,
    write_whole,
)


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


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o027)
    yield 0o027
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o644, 0o666, 0o755], ids=oct)
def test_a_file_keeps_its_mode_and_is_never_more_open_meanwhile(tmp_path, mode):
    path, modes = tmp_path / "file", []
    path.write_text("before")
    path.chmod(mode)

    def write(file):
        modes.append(mode_of(tmp_path / file.name))
        file.write(b"after")

    write_whole(path, write)
    assert (path.read_text(), mode_of(path)) == ("after", mode)
    assert modes == [mode & 0o750]
    assert os.listdir(tmp_path) == ["file"]


def test_a_new_file_has_the_mode_of_any_other_or_of_one_that_is_named(tmp_path, umask, monkeypatch):
    monkeypatch.delattr(os, "umask")  # of all threads of the process, for a moment
    write_text(tmp_path / "file", "text")
    assert mode_of(tmp_path / "file") == 0o666 & ~umask
    (tmp_path / "file").chmod(0o600)
    write_text(tmp_path / "new", "text", like=tmp_path / "file")
    assert mode_of(tmp_path / "new") == 0o600
    write_text(tmp_path / "other", "text", like=tmp_path / "none")
    assert mode_of(tmp_path / "other") == 0o666 & ~umask
    monkeypatch.undo()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_what_root_replaces_keeps_its_owner(tmp_path):
    path = tmp_path / "file"
    path.write_text("before")
    os.chown(path, 12345, 54321)
    write_text(path, "after")
    assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)


def test_a_lock_lets_one_thread_at_a_time_in_and_leaves_nothing(tmp_path):
    inside, most = 0, []

    def work():
        nonlocal inside
        for _ in range(20):
            with locked(tmp_path / ".lock"):
                inside += 1
                time.sleep(0.0005)
                most.append(inside)
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 80
    assert os.listdir(tmp_path) == []


def test_the_lock_of_a_dead_process_is_free(tmp_path):
    child = os.fork()
    if child == 0:
        with locked(tmp_path / ".lock"):
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert os.listdir(tmp_path) == [".lock"]
    with locked(tmp_path / ".lock"):
        pass
    assert os.listdir(tmp_path) == []


def test_without_locks_there_is_a_warning(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="cannot be locked"), locked(tmp_path / ".lock"):
        pass


def test_tensors_are_read_or_the_damaged_file_is_named(tmp_path):
    path = tmp_path / "a.safetensors"
    tensors = {"a": torch.randn(3, 5)}
    path.write_bytes(to_safetensors(tensors))
    assert torch.equal(read_safetensors(path)["a"], tensors["a"])
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged: its tensors do not have"):
        read_safetensors(path)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"a\.safetensors is damaged or not a safetensors file: "):
        read_safetensors(path)


@pytest.mark.parametrize("step", ["safetensors.safe_open", "irpe.files.tensor_checksum"])
def test_a_file_that_is_replaced_while_it_is_read_is_read_again(tmp_path, monkeypatch, step):
    """Its header and its tensors are read one after the other, by its name."""
    path = tmp_path / "a.safetensors"
    write_bytes(path, to_safetensors({"a": torch.zeros(2)}))

    def replace_and_fail(*_, **__):
        monkeypatch.undo()
        write_bytes(path, to_safetensors({"a": torch.ones(2)}))
        if "safe_open" in step:
            raise RuntimeError("unable to open file: no such file or directory")
        return "of header and tensors of two files"

    monkeypatch.setattr(step, replace_and_fail)
    assert torch.equal(read_safetensors(path)["a"], torch.ones(2))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.0),
        torch.zeros(0, 4),
        torch.randn(3, 5).bfloat16(),
        torch.randn(2, 3).T.contiguous(),
        torch.tensor([True, False]),
        torch.arange(3),
    ],
)
def test_tensors_of_every_kind_have_a_checksum(tmp_path, tensor):
    path = tmp_path / "a.safetensors"
    path.write_bytes(to_safetensors({"a": tensor}))
    read = read_safetensors(path)["a"]
    assert read.dtype == tensor.dtype
    assert torch.equal(read, tensor)


def test_tensors_without_a_checksum_are_read_with_a_warning(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "a.safetensors")
    with pytest.warns(UserWarning, match=r"a\.safetensors has no checksum"):
        read_safetensors(tmp_path / "a.safetensors")


def test_where_a_file_cannot_be_written(tmp_path):
    check_writable(tmp_path / "new")
    with pytest.raises(IsADirectoryError, match="is a folder: name a file"):
        check_writable(tmp_path)
    with pytest.raises(FileNotFoundError, match="does not exist: make it first"):
        check_writable(tmp_path / "none" / "new")


@pytest.mark.parametrize("before", ["before", None], ids=["file", "dangling"])
def test_a_symbolic_link_is_followed(tmp_path, before):
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere/file", tmp_path / "link"
    if before:
        target.write_text(before)
    (tmp_path / "first").symlink_to(target)
    link.symlink_to("first")
    write_text(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert sorted(os.listdir(tmp_path)) == ["elsewhere", "first", "link"]
    assert os.listdir(target.parent) == ["file"]


def make_device(path):
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null
    except PermissionError:
        pytest.skip("mknod is not permitted")


def make_link_to_fifo(path):
    os.mkfifo(path.with_name("fifo"))
    path.symlink_to("fifo")


@pytest.mark.parametrize(
    "make",
    [make_device, os.mkfifo, make_link_to_fifo, lambda path: path.symlink_to(path)],
    ids=["device", "FIFO", "link to a FIFO", "link to itself"],
)
def test_what_is_not_a_file_is_refused_and_stays(tmp_path, make):
    path = tmp_path / "node"
    make(path)
    before = {p.name: p.lstat().st_mode for p in tmp_path.iterdir()}
    for refuses in (check_writable, lambda path: write_text(path, "after")):
        with pytest.raises(OSError, match=r"node is a device, a FIFO, .*: name a file"):
            refuses(path)
    assert {p.name: p.lstat().st_mode for p in tmp_path.iterdir()} == before


def test_errors_name_the_file_and_not_a_hidden_one(tmp_path, monkeypatch):
    def refuse(source, target):
        raise PermissionError(1, "Operation not permitted", source, None, target)

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError) as caught:
        write_text(tmp_path / "file", "text")
    assert str(caught.value) == f"[Errno 1] Operation not permitted: '{tmp_path / 'file'}'"
    with pytest.raises(OSError, match=f"File name too long: '{tmp_path}/n+'"):
        write_text(tmp_path / ("n" * 250), "text")
    assert os.listdir(tmp_path) == []
