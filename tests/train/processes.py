"""Runs in processes of their own: several at once, and some that are killed."""

import os
import random
import subprocess
import sys
import time
from pathlib import Path

from irpe.train.run import Run

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")]),
    "OMP_NUM_THREADS": "1",
}


def torchrun(processes, *arguments, cwd=None):
    """Returns what processes wrote that ended well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", str(processes)]
    command += ["--master_port", "0", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0"]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def start(*arguments, **options):
    """Starts Python in a process of its own."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env=ENVIRONMENT, **options)


def wait_for(path, process):
    """Waits until a running process has written a file."""
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)


def position(path):
    """Where a run stands; a checkpoint that exists can always be read."""
    state = Run(path.parent).checkpoint() if path.exists() else {"epoch": 0, "step": 0}
    return state["epoch"], state["step"]


def kill_again_and_again(start_run, path, times):
    """Kills a run some time after each new checkpoint, and starts it again."""
    moments = random.Random(0)
    for _ in range(times):
        before = position(path)
        process = start_run()
        while position(path) <= before:
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.1))
        process.kill()
        process.wait()
        assert position(path) > before
