"""Reports of what was timed, with what is needed to judge them."""

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def write_report(path: Path, results: dict[str, Any]) -> None:
    """Writes the results with what is needed to judge them."""
    report = {
        "results": results,
        "versions": {
            name: importlib.metadata.version(name) for name in ("irpe", "torch", "timm", "numpy")
        },
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "commit": _commit(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"
