"""The areas of the campaign, and how many cases of each are run."""

from contextlib import closing

from hostile import commands, damages, operators, transforms
from hostile.cases import run

QUICK, WHOLE = "quick", "whole"
# By area: what it is, and the size of the seeded part and of the whole.
AREAS = {
    "operators": ("bucket maps and attention, every implementation, against NumPy", 60, 4000),
    "files": ("damaged copies of 16 file formats, each a flipped bit or a cut", 20, 1000),
    "commands": ("the command line with bad arguments, a process each", 12, 400),
    "transforms": (
        "threads, and torch.func: jvp, grad, vmap, jacrev, second derivatives",
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
    return run({"operators": operators, "transforms": transforms}[name].cases(0, count))
