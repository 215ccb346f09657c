"""Cells on real clusters, with a fault each: the scores are those of this machine's processes.

SLURM and Dask are started here on loopback and ended by process id. Slow; skipped where a part is
missing.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from ablation.slurm_cluster import NODES, SlurmCluster, ask, missing_parts
from ablation.small import small_cells, write_images
from cli.terminal import irpe
from train.processes import position

from irpe.ablation.cells import read_result
from irpe.ablation.clusters import Dask, Slurm
from irpe.ablation.executors import Failure, LocalProcesses, run_cells
from irpe.train.processes import StoppedError

pytestmark = pytest.mark.slow
SEEDS = 6


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def local(tmp_path_factory, data):
    """What 12 cells find in processes of this machine."""
    with LocalProcesses(2) as processes:
        found = run_cells(cells_in(tmp_path_factory.mktemp("local"), data), processes)
    assert not failures_in(found)
    assert len(found) == 2 * SEEDS
    return found


def failures_in(found):
    return [each for each in found if isinstance(each, Failure)]


def cells_in(folder, data):
    return small_cells(folder, data, SEEDS, epochs=60, eval_every=20)


class Faults:
    """Does one thing to each cell of a list, when that cell is in the middle of its training."""

    def __init__(self, **acts):
        self.acts = {f"{row}, seed {seed}": act for (row, seed), act in acts.pop("of").items()}
        self.ended = {}

    def __call__(self, event):
        if event.result is not None:
            self.ended[event.work] = event.result
        elif event.done and event.work in self.acts:
            self.acts.pop(event.work)()


def process_of(cell):
    """The process that trains a cell, which holds its lock."""
    return int((cell.directory / ".lock").read_text().split()[1])


@pytest.mark.parametrize("has_accounting", [True, False])
def test_slurm(tmp_path, data, local, has_accounting):
    pytest.importorskip("submitit")
    if reason := missing_parts(has_accounting=has_accounting):
        pytest.skip(reason)
    cells = cells_in(tmp_path / "ablation", data)
    by_name = {cell.name: cell for cell in cells}

    def job_of(name):
        return json.loads((by_name[name].directory / "job.json").read_text())["id"]

    def new_slurm(**options):
        return Slurm({"partition": "all", "timeout_min": "20"}, pause=1, **options)

    with SlurmCluster(tmp_path / "slurm", has_accounting=has_accounting) as cluster:

        def take_node_away():
            node = ask("squeue", "-h", "-j", job_of("absolute, seed 2"), "-o", "%N")
            assert node in NODES
            ask("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
            time.sleep(3)
            ask("scontrol", "update", f"nodename={node}", "state=resume")

        def restart_controller():
            cluster.end("slurmctld")
            time.sleep(3)
            cluster.start_controller()

        def stop():
            os.kill(os.getpid(), signal.SIGINT)

        faults = Faults(
            of={
                ("absolute", 0): lambda: os.kill(
                    process_of(by_name["absolute, seed 0"]), signal.SIGKILL
                ),
                ("K", 0): lambda: ask("scancel", job_of("K, seed 0")),
                ("absolute", 1): stop,
            }
        )
        with pytest.raises(StoppedError, match="its SLURM jobs go on"):
            run_cells(cells, new_slurm(), faults)
        jobs = ask("squeue", "-h", "-t", "all", "-o", "%i").split()
        assert len(jobs) == len(cells)

        faults = Faults(of={("absolute", 2): take_node_away, ("K", 3): restart_controller})
        found = run_cells(cells, new_slurm(), faults)
        assert not faults.acts  # each of them happened
        assert set(ask("squeue", "-h", "-t", "all", "-o", "%i").split()) == set(jobs)  # no new ones
        reasons = {failure.cell.name: str(failure) for failure in failures_in(found)}
        assert reasons.keys() == {"absolute, seed 0", "K, seed 0"}, reasons
        assert "ended as FAILED" in reasons["absolute, seed 0"]
        assert "ended as CANCELLED" in reasons["K, seed 0"]
        assert all(isinstance(faults.ended[name], Failure) for name in reasons)

        assert len(failures_in(run_cells(cells, new_slurm()))) == 2  # not without a request
        assert run_cells(cells, new_slurm(is_resubmitting=True)) == local


def test_the_command_shows_slurm_jobs_and_those_that_timed_out(tmp_path, data):
    """`irpe ablate --cluster slurm`, ended and started again; some jobs run for three minutes."""
    pytest.importorskip("submitit")
    if reason := missing_parts(has_accounting=False):
        pytest.skip(reason)
    model = '{"patch_size": 7, "embed_dim": 16, "depth": 2, "num_heads": 2}'
    options = ["ablate", "--recipe", "laptop", "--data", data, "--model-args", model, "-o", "out",
               "--warmup-epochs", "0", "--batch-size", "8", "--seeds", "1", "--row", "K=K",
               "--row", "absolute=none,keep", "--epochs", "20000", "--set", "eval_every=20000",
               "--cluster", "slurm", "--slurm"]  # fmt: skip
    short = [*options, "timeout_min=3,signal_delay_s=20,partition=all"]
    with SlurmCluster(tmp_path / "slurm", has_accounting=False):
        command = [sys.executable, "-m", "irpe", *short]
        with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as begun:
            while len(list(tmp_path.glob("out/cells/*/job.json"))) < 2:
                assert begun.poll() is None, begun.stderr.read()
                time.sleep(0.2)
            begun.send_signal(signal.SIGINT)
            said = begun.stderr.read()
        assert begun.returncode == 128 + signal.SIGINT
        assert "stopped after 0 of 2 cells, its SLURM jobs go on" in said
        again = irpe(*short, cwd=tmp_path)
        assert again.returncode == 1
        for number in (1, 2):
            assert f"[{number}/2] " in again.stderr
        assert again.stderr.count("--resubmit submits it again") >= 2
        assert again.stderr.count("it timed out or was preempted, and saved itself") >= 2
        seen = [position(path) for path in tmp_path.glob("out/cells/*/checkpoint.pt")]
        assert all(step > (0, 0) for step in seen)


def test_slurm_jobs_that_the_controller_forgot_are_judged_by_their_folders(tmp_path, data):
    pytest.importorskip("submitit")
    if reason := missing_parts(has_accounting=False):
        pytest.skip(reason)
    cells = small_cells(tmp_path / "ablation", data, 1)
    slurm = Slurm({"timeout_min": "20"}, pause=1)
    with SlurmCluster(tmp_path / "slurm", has_accounting=False, age=2):
        assert not failures_in(run_cells(cells, slurm))
        for cell in cells:
            (cell.directory / "result.json").unlink()
        while ask("squeue", "-h", "-t", "all"):
            time.sleep(1)
        failures = failures_in(run_cells(cells, Slurm({}, pause=1)))
        assert all("no longer known to SLURM" in str(failure) for failure in failures)
        assert len(failures) == 2


@pytest.fixture
def scheduler(tmp_path, monkeypatch):
    """The address of a Dask scheduler with two workers, in processes of their own."""
    pytest.importorskip("distributed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    with ExitStack() as stack:

        def start(*command):
            process = subprocess.Popen([sys.executable, "-m", *command], cwd=tmp_path)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        file = tmp_path / "scheduler.json"
        options = ("--host", "127.0.0.1", "--port", "0", "--no-dashboard")
        start("distributed.cli.dask_scheduler", *options, "--scheduler-file", str(file))
        while not file.exists():
            time.sleep(0.1)
        for _ in NODES:
            worker = ("distributed.cli.dask_worker", "--scheduler-file", str(file))
            start(*worker, "--nthreads", "1", "--no-dashboard")
        yield file


def address_of(file):
    return json.loads(file.read_text())["address"]


def parent_of(process):
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])


def test_dask(tmp_path, data, local, scheduler):
    cells = cells_in(tmp_path / "ablation", data)
    by_name = {cell.name: cell for cell in cells}

    def kill_worker():
        os.kill(parent_of(process_of(by_name["absolute, seed 1"])), signal.SIGKILL)

    def kill_cell():
        os.kill(process_of(by_name["K, seed 5"]), signal.SIGKILL)

    def stop():
        os.kill(os.getpid(), signal.SIGINT)

    faults = Faults(of={("absolute", 1): kill_worker, ("K", 2): stop})
    with Dask(address_of(scheduler)) as dask:
        with pytest.raises(StoppedError, match="its Dask tasks go on"):
            run_cells(cells, dask, faults)
        assert not faults.acts
    done = sum(read_result(cell) is not None for cell in cells)
    assert done < len(cells)
    with Dask(address_of(scheduler)) as dask:
        (failure,) = failures_in(run_cells(cells, dask, Faults(of={("K", 5): kill_cell})))
        assert failure.cell.name == "K, seed 5"
        assert "ended by SIGKILL" in str(failure)
    with Dask(address_of(scheduler)) as dask:
        assert run_cells(cells, dask) == local


def test_a_dask_client_is_an_executor(tmp_path, data, local, scheduler):
    import distributed

    with distributed.Client(address_of(scheduler), set_as_default=False) as client:
        assert run_cells(cells_in(tmp_path / "ablation", data)[:4], client) == local[:4]
