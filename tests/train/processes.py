"""Runs in processes of their own: several at once, and some that are killed."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from irpe.train.checkpoint import load_checkpoint

TESTS = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}


def torchrun(processes, *arguments, cwd=None):
    """Returns what processes wrote that ended well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def start(code, *arguments):
    """Starts some code in a process of its own."""
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], env=ENVIRONMENT)


def place(path):
    """Where a run stands; a checkpoint that is there can always be read."""
    state = load_checkpoint(path) if path.exists() else {"epoch": 0, "step": 0}
    return state["epoch"], state["step"]


def kill_again_and_again(start_run, path, times):
    """Kills a run some time after each new checkpoint, and starts it again."""
    moments = random.Random(0)
    for _ in range(times):
        before = place(path)
        process = start_run()
        while place(path) <= before:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.3))
        process.kill()
        process.wait()
        assert place(path) > before
