"""Two processes give the gradients of one: DDP, FSDP, checkpointed activations, checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


@pytest.mark.slow
def test_two_processes(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    path = f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [*command, str(TESTS / "finetuning" / "two_processes.py"), str(tmp_path)],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-6000:]
    assert {"done0", "done1"} <= {file.name for file in tmp_path.iterdir()}
