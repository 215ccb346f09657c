"""File systems of a process of its own: full ones, small ones, and ones that are read-only."""

import os
import shutil
import subprocess
import sys

NAMESPACE = ["unshare", "--mount", "env", "IRPE_TEST_MOUNTS=1"]  # before a command
_INSIDE = "IRPE_TEST_MOUNTS"  # set in a process that has its own mount namespace


def is_permitted():
    """Returns whether this process may make a mount namespace and mount in it."""
    command = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    is_there = shutil.which("unshare") is not None
    return is_there and subprocess.run(command, capture_output=True).returncode == 0


def enter_namespace():
    """Starts this program again in a mount namespace, whose mounts end with it.

    Returns:
        Whether it runs in one; if none is permitted it goes on without.
    """
    if _INSIDE not in os.environ and is_permitted():
        os.execvp(NAMESPACE[0], [*NAMESPACE, *sys.orig_argv])
    return _INSIDE in os.environ


def mount_tmpfs(folder, num_bytes):
    """Mounts an empty file system of a size; only in a namespace of its own."""
    assert _INSIDE in os.environ, "mounts would outlive this process"
    what = ["-t", "tmpfs", "-o", f"size={num_bytes}"]
    subprocess.run(["mount", *what, "tmpfs", str(folder)], check=True)


def make_read_only(folder):
    """Mounts what is mounted at a folder again, so that nothing can be written there."""
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def unmount(folder):
    """Unmounts what was mounted at a folder, if anything was."""
    if os.path.ismount(folder):
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
