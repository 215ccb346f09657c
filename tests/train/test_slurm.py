"""The sbatch script of docs/how-to/train-at-scale.md, in a SLURM of two nodes on this machine."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from ablation.slurm_cluster import SlurmCluster, ask, missing_parts
from train import little
from train.processes import ENVIRONMENT, ROOT, position
from train.test_two_processes import CLASSIFIER

from irpe.train.engine import train
from irpe.train.run import Run

pytestmark = pytest.mark.slow
BOUND = 600  # seconds in which a job has ended, on a machine with other work
# Adam makes steps of one size even from gradients that are all noise.
CONFIG = CLASSIFIER.replace(optimizer="sgd", lr=1e-2, epochs=12, save_every=10)


def script_for(run, file):
    """The script of the page, with what it shows replaced by what this machine has."""
    page = (ROOT / "docs/how-to/train-at-scale.md").read_text()
    (script,) = re.findall(r"```bash\n(#!/bin/bash\n.*?)```", page, re.DOTALL)
    replaced = {
        "#SBATCH --cpus-per-task=64\n#SBATCH --gpus-per-node=8\n": "",
        "--nproc_per_node 8": "--nproc_per_node 1",
        "SHARED/runs/deit_small": str(run),
        "deit_small --data IMAGENET --encoding product-contextual-k --precision bf16": (
            f"--config {file}"
        ),
    }
    for shown, here in replaced.items():
        assert shown in script
        script = script.replace(shown, here)
    return script


def submit(path):
    environment = {**ENVIRONMENT, "SLURM_CONF": os.environ["SLURM_CONF"],
                   "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # fmt: skip
    command = ["sbatch", "--parsable", "--output", f"{path}.output", str(path)]
    return subprocess.check_output(command, env=environment, text=True).strip()


def wait_until(condition, path):
    end = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < end, Path(f"{path}.output").read_text()
        time.sleep(0.2)


def test_the_script_for_slurm_stops_and_goes_on(tmp_path):
    if reason := missing_parts(has_accounting=False):
        pytest.skip(reason)
    data, run, script = tmp_path / "data", tmp_path / "run", tmp_path / "train.sh"
    for split, source in zip(("train", "val"), little.little(240), strict=True):
        for index in range(len(source)):
            image, label = source.read(index)
            (data / split / str(label)).mkdir(parents=True, exist_ok=True)
            image.save(data / split / str(label) / f"{index}.png")
    config = CONFIG.replace(data=str(data))
    (tmp_path / "run.json").write_text(config.to_json())
    script.write_text(script_for(run, tmp_path / "run.json"))

    def state_of(job):
        return ask("squeue", "-h", "-j", job, "-t", "all", "-o", "%T")

    with SlurmCluster(tmp_path / "slurm", has_accounting=False):
        first = submit(script)
        wait_until((run / "checkpoint.pt").exists, script)
        ask("scancel", "--signal=TERM", first)  # as --signal does when time is nearly over
        wait_until(lambda: state_of(first) not in {"RUNNING", "COMPLETING"}, script)
        stopped = position(run / "checkpoint.pt")
        assert (0, 0) < stopped < (CONFIG.epochs, 0)
        second = submit(script)
        wait_until(lambda: state_of(second) in {"COMPLETED", "FAILED"}, script)
        said = Path(f"{script}.output").read_text()
        assert state_of(second) == "COMPLETED", said
    found = Run(run).checkpoint()
    train(config, tmp_path / "one")
    expected = Run(tmp_path / "one").checkpoint()
    assert found["epoch"] == expected["epoch"] == CONFIG.epochs
    for name, value in expected["model"].items():
        assert torch.allclose(found["model"][name], value, atol=1e-5), name
