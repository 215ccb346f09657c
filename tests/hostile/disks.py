"""Commands that write to a disk that is full, or read-only: one line, and nothing changes.

The disks are tmpfs mounts in the mount namespace of the process that runs the commands. Root may
write whatever the permissions say, so a folder without permissions would not do.
"""

import shutil
import sys
from functools import partial
from pathlib import Path

from hostile import damages, forked, mounts
from hostile.cases import Case
from hostile.commands import Server
from train import little

# Each ends with 0 on a disk with space, and writes something there.
WRITING = [
    ["show", "buckets", "-o", "x.png"],
    ["show", "buckets", "-o", "x.svg"],
    ["show", "index", "-o", "x.png"],
    ["explore", "-o", "x.html"],
    ["show", "tables", "run", "-o", "x.png"],
    ["show", "locality", "run", "-o", "x.png"],
    ["show", "weights", "run", "-o", "x.png"],
    ["show", "cost", "--resolutions", "224", "-o", "x.png"],
    ["show", "star", "run", "--block", "0", "-o", "x.gif"],
    ["train", "--resume", "run"],
    ["train", "laptop", "--data", "images", "--epochs", "5", "--batch-size", "4", "-o", "new"],
]


SPACE = {"full": 4 << 20, "read-only": 4 << 20, "plain": 64 << 20}  # bytes


class DiskServer(Server):
    """Runs commands on a disk of its own.

    Args:
        folder: An empty folder.
        kind: One of `SPACE`.
    """

    def __init__(self, folder, kind):
        super().__init__(folder, [*mounts.NAMESPACE], ["hostile.disks", str(folder), kind])
        assert self.process.stdout.readline() == "ready\n"

    def listing(self):
        """Returns the files on the disk with their sizes, as the process sees them."""
        root = Path(f"/proc/{self.process.pid}/root{self.folder}")
        return {(str(path), path.stat().st_size) for path in root.rglob("*")}

    def check(self, arguments):
        """Returns whether a command fails as it should, and leaves the disk as it was."""
        before = self.listing()
        code, said = self.run(arguments)
        if code != 1 or "Traceback" in said or len(said.strip().splitlines()) != 1:
            return f"exit {code}: {said[-300:]}"
        changed = sorted(before ^ self.listing())
        return f"changed {changed}" if changed else "refused"


def serve(folder, kind):
    """Mounts a disk with a run on it, and runs commands there."""
    disk = Path(folder) / "commands" / "here"
    mounts.mount_tmpfs(disk, SPACE[kind])
    for split in ("train", "val"):
        damages.save_pictures(disk / "images" / split, "png")
    config = little.CONFIG.replace(data=str(disk / "images"), epochs=1, batch_size=4)
    little.write_run(disk / "run", config.replace(classes=("0", "1")))
    if kind == "read-only":
        mounts.make_read_only(disk)
    elif kind == "full":
        with (disk / "ballast").open("wb", buffering=0) as file:
            while file.write(bytes(shutil.disk_usage(disk).free)):
                pass
    print("ready", flush=True)
    forked.serve()


def cases(count, server):
    """Yields commands, of which each writes to the disk of a server."""
    for arguments in WRITING[:count]:
        yield Case(" ".join(arguments), partial(server.check, arguments))


if __name__ == "__main__":
    serve(*sys.argv[1:])
