"""The areas of the campaign, and how many cases of each are run."""

from contextlib import closing

from hostile import (
    commands,
    damages,
    disks,
    interruption,
    modes,
    mounts,
    native,
    operators,
    pictures,
    runs,
    transforms,
)
from hostile.cases import Count, run

QUICK, WHOLE = "quick", "whole"
# By area: what it is, and the size of the seeded part and of the whole.
AREAS = {
    "operators": ("bucket maps and attention, every implementation, against NumPy", 60, 4000),
    "native": ("calls of any sizes of the compiled kernels, against the reference", 60, 20_000),
    "modes": (
        "calls with other threads, without values, of several gradients, in autocast, of nothing",
        5,
        1000,
    ),
    "pictures": ("images in every mode of Pillow, and with elements that are no shades", 2, 300),
    "files": ("damaged copies of 16 file formats, each a flipped bit or a cut", 20, 1000),
    "commands": ("the command line with bad arguments, a process each", 12, 400),
    "disks": ("commands that write to a full and to a read-only file system", 1, 11),
    "runs": ("two processes in one directory: runs, and models that are saved", 1, 10),
    "interruption": ("saves that are interrupted or killed at any call of the system", 4, 300),
    "transforms": (
        "threads, forks, and torch.func: jvp, grad, vmap, jacrev, second derivatives",
        1,
        10,
    ),
}


def run_area(name, size, folder):
    """Returns what became of the cases of an area.

    Args:
        name: The area.
        size: `QUICK` or `WHOLE`.
        folder: An empty folder.
    """
    count = AREAS[name][1 if size == QUICK else 2]
    if name == "files":
        return run(damages.cases(0, count, folder))
    if name == "commands":
        with closing(commands.Server(folder)) as server:
            return run(commands.cases(0, count, server))
    if name == "disks":
        return run_disks(count, folder, ("full",) if size == QUICK else ("full", "read-only"))
    if name == "runs":
        return run(runs.cases(0, count, folder))
    if name in ("interruption", "pictures"):
        return run(
            {"interruption": interruption, "pictures": pictures}[name].cases(0, count, folder)
        )
    of_calls = {"native": native, "operators": operators, "modes": modes, "transforms": transforms}
    return run(of_calls[name].cases(0, count))


def run_disks(count, folder, kinds):
    """Returns what became of commands on disks; none where mounts are not permitted."""
    found = Count()
    for kind in kinds if mounts.is_permitted() else ():
        with closing(disks.DiskServer(folder / kind, kind)) as server:
            found += run(disks.cases(count, server))
    return found
