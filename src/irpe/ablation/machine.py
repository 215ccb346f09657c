"""The machine that cells run on: how many of them at a time, and what to say of it."""

import os
import platform
from contextlib import suppress
from pathlib import Path

import timm
import torch

import irpe
from irpe.errors import UserError

_USUAL = 10**9  # bytes of a cell's process


def available_cores() -> int:
    """Returns how many cores this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def available_memory() -> int | None:
    """Returns the bytes of memory that are free, within the limit of a container; if known."""
    found: list[int] = []
    with suppress(OSError, ValueError, IndexError):
        free = Path("/proc/meminfo").read_text().split("MemAvailable:")[1]
        found.append(1024 * int(free.split()[0]))
    with suppress(OSError, ValueError):  # "max" where there is no limit
        limit, used = (Path(f"/sys/fs/cgroup/memory.{name}") for name in ("max", "current"))
        found.append(int(limit.read_text()) - int(used.read_text()))
    return min(found, default=None)


def gpus() -> list[str]:
    """Returns the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",")[:count] if visible else [str(index) for index in range(count)]


def choose_jobs(requested: int | None, num_cells: int, devices: int) -> int:
    """Returns how many cells run at a time.

    Args:
        requested: What the user asked for; `None`: as many as there are GPUs, or cores and a
            gigabyte of memory for each.
        num_cells: How many cells there are.
        devices: The number of GPUs.
    """
    if requested is None:
        memory = available_memory()
        fitting = num_cells if memory is None else max(1, memory // _USUAL)
        return min(devices or available_cores(), fitting, num_cells)
    if requested < 1 or (devices and requested > devices):
        most = f"{devices}, the number of GPUs" if devices else "as many as the memory allows"
        raise UserError(f"jobs = {requested} must be 1 to {most}")
    return min(requested, num_cells)


def describe_machine(device: torch.device) -> dict[str, str]:
    """Returns what scores may depend on, beside the settings, by the name of each fact.

    Args:
        device: What is computed on.
    """
    is_gpu = device.type == "cuda"
    return {
        "irpe": irpe.__version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "python": platform.python_version(),
        "implementation": _implementation(device),
        "processor": torch.cuda.get_device_name(device) if is_gpu else processor(),
    }


def _implementation(device: torch.device) -> str:
    """Returns the name of the implementation that a call of attention takes on a device."""
    q, maps = (
        torch.zeros(1, 1, 4, 8, device=device),
        irpe.bucket_maps("product-contextual-k", (2, 2)),
    )
    return irpe.explain(q, q, q, maps, key_tables=[torch.zeros(1, 49, 8, device=device)]).name


def processor() -> str:
    """Returns the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
