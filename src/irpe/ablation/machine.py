"""How many cells a machine can run at a time: cores, memory, GPUs."""

import os
import sys
from pathlib import Path

import torch

from irpe.errors import UserError

_MEGABYTE = 10**6
_USUAL = 10**9  # bytes of a program that has loaded torch and timm


def available_cores() -> int:
    """Returns how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available_memory() -> int | None:
    """Returns the bytes of memory that are free, within the limit of a container; if known."""
    found: list[int] = []
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(1024 * int(lines["MemAvailable"].split()[0]))
    except (OSError, KeyError, ValueError):
        pass
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())  # "max" where there is none
        found.append(limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return min(found, default=None)


def program_memory() -> int:
    """Returns the bytes of memory that a cell's process takes before it trains.

    As much as this one has taken at most, but for what a notebook or a test did in it before: a
    cell starts anew, and loads the libraries alone.
    """
    try:
        import resource
    except ImportError:  # on Windows
        return _USUAL
    unit = 1 if sys.platform == "darwin" else 1024
    return min(_USUAL, unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def gpus() -> list[str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(index) for index in range(count)]


def choose_jobs(requested: int | None, num_cells: int, need: int, devices: int) -> int:
    """Returns how many cells run at a time.

    Args:
        requested: What the user asked for; `None`: as many as there are cores and memory, or GPUs.
        num_cells: How many cells there are.
        need: The bytes of memory that a cell needs.
        devices: The number of GPUs.
    """
    if requested is not None and requested < 1:
        raise UserError(f"--jobs {requested} must be at least 1")
    memory = available_memory()
    fitting = max(num_cells, requested or 1) if memory is None else memory // need
    most = min(fitting, devices or fitting)
    if most < (requested or 1):
        free = f"{(memory or 0) // _MEGABYTE:,} MB are free"
        gpus_too = f", and there are {devices} GPUs" if devices else ""
        remedy = f"choose 1 to {most}" if most else "choose smaller batches or images"
        raise UserError(
            f"--jobs {requested or 1}: a cell needs about {need // _MEGABYTE:,} MB and "
            f"{free}{gpus_too}: {remedy}"
        )
    return min(requested or devices or available_cores(), most, num_cells)
