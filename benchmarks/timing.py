"""Times taken side by side, and reports with what is needed to judge them."""

import importlib.metadata
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Runs = Mapping[str, Callable[[], object]]


def interleaved_medians(runs: Runs, rounds: int) -> dict[str, dict[str, float]]:
    """Returns the median CPU time of this thread and the median wall time of each run, in seconds.

    All runs take turns in each round. Times of one thread are CPU times: set one thread first.
    """
    for run in runs.values():
        run()  # loads what is loaded on first use
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            cpu, wall = time.thread_time(), time.perf_counter()
            run()
            seconds[name].append((time.thread_time() - cpu, time.perf_counter() - wall))
    return {
        name: {
            "cpu": statistics.median(cpu for cpu, _ in taken),
            "wall": statistics.median(wall for _, wall in taken),
        }
        for name, taken in seconds.items()
    }


def ratios_to(plain: str, medians: dict[str, dict[str, float]], kind: str) -> dict[str, float]:
    """Returns the times of one kind relative to those of the plain run."""
    return {
        name: round(taken[kind] / medians[plain][kind], 3)
        for name, taken in medians.items()
        if name != plain
    }


def write_report(path: Path | None, results: dict[str, Any]) -> None:
    """Writes the results with what is needed to judge them; nowhere without a path."""
    if path is None:
        return
    report = {
        "results": results,
        "versions": {
            name: importlib.metadata.version(name) for name in ("irpe", "torch", "timm", "numpy")
        },
        "python": platform.python_version(),
        "processor": _processor(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")


def _processor() -> str:
    """Returns the name of the processor; Linux adds the numbers of its family and model."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or platform.machine()
    lines = path.read_text().partition("\n\n")[0].splitlines()
    parts = [line.partition(":") for line in lines]
    fields = {name.strip(): value.strip() for name, _, value in parts}
    family = f"family {fields.get('cpu family')}, model {fields.get('model')}"
    return f"{fields.get('model name', platform.machine())} ({family})"


def _commit() -> str:
    """Returns the commit, marked where code has changed since; results and figures may."""
    commit = _git("describe", "--always", "--abbrev=12") or "unknown"
    return f"{commit}-dirty" if _git("status", "--porcelain", "src", "benchmarks/*.py") else commit


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], capture_output=True, text=True)
    return done.stdout.strip()
