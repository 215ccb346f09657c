"""Two nodes train what one process trains; a lost node or a cut cable ends the run with a line.

All of it is slow: each start of torchrun on two nodes loads torch four times.
"""

import time
from contextlib import closing

import pytest
import torch
from train import little
from train.nodes import Nodes
from train.processes import wait_for
from train.test_two_processes import CLASSIFIER

from irpe.train.engine import train
from irpe.train.run import Run

pytestmark = pytest.mark.slow
TIMEOUT = "10"  # seconds that a process waits for the other one
BOUND = 300  # seconds in which a run has ended, on a machine with other work
# Adam makes steps of one size even from gradients that are all noise.
CONFIG = CLASSIFIER.replace(optimizer="sgd", lr=1e-2, epochs=3, save_every=10)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """240 images to train on and 20 to evaluate on, in a folder that both nodes see."""
    data = tmp_path_factory.mktemp("data")
    for split, source in zip(("train", "val"), little.little(240), strict=True):
        for index in range(len(source)):
            image, label = source.read(index)
            (data / split / str(label)).mkdir(parents=True, exist_ok=True)
            image.save(data / split / str(label) / f"{index}.png")
    return CONFIG.replace(data=str(data))


@pytest.fixture(scope="module")
def expected(task, tmp_path_factory):
    """What one process trains."""
    directory = tmp_path_factory.mktemp("one")
    train(task, directory)
    return Run(directory).checkpoint()


@pytest.fixture
def nodes():
    with closing(Nodes()) as nodes:
        reason = nodes.open()
        if reason:
            pytest.skip(reason)
        yield nodes


@pytest.fixture
def run(task, tmp_path):
    """The directory of a run that has not begun."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(task.config.to_json())
    return tmp_path / "run"


def start(nodes, run):
    """Starts or resumes a run on both nodes; returns the launchers and their logs."""
    logs = [run.parent / f"log-{index}" for index in range(2)]
    command = ["-m", "irpe", "train", "--resume", run]
    started = [nodes.start(k, log, *command, IRPE_TIMEOUT=TIMEOUT) for k, log in enumerate(logs)]
    return started, logs


def check_to_the_end(nodes, run, expected):
    """A run that goes on ends with what one process trains."""
    started, logs = start(nodes, run)
    for process, log in zip(started, logs, strict=True):
        assert process.wait(BOUND) == 0, log.read_text()
    found = Run(run).checkpoint()
    assert found["epoch"] == CONFIG.epochs
    for name, value in expected["model"].items():
        torch.testing.assert_close(found["model"][name], value, atol=1e-5, rtol=0, msg=name)
    for own, one in zip(found["history"], expected["history"], strict=True):
        assert own["train_loss"] == pytest.approx(one["train_loss"], abs=1e-5)
        assert own["top1"] == one["top1"]


def check_lost(nodes, index, log):
    """The process on a node says in one line that it lost the other one, and ends."""
    end = time.monotonic() + BOUND
    while nodes.count_processes(index) > 1:  # besides the launcher
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)
    said = [line for line in log.read_text().splitlines() if line.startswith("irpe: ")]
    assert len(said) == 1, log.read_text()
    assert said[0].startswith("irpe: another process of this run ended, cannot be reached")
    assert "--resume" in said[0]


def test_two_nodes_train_what_one_process_trains(nodes, run, expected):
    check_to_the_end(nodes, run, expected)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_node_that_is_killed_ends_the_run_which_goes_on(nodes, run, expected, killed):
    started, logs = start(nodes, run)
    wait_for(run / "metrics.csv", started[0])
    nodes.kill(killed)
    check_lost(nodes, 1 - killed, logs[1 - killed])
    assert started[1 - killed].wait(BOUND) == 1
    assert not (run / "model").exists()
    check_to_the_end(nodes, run, expected)


def test_a_cable_that_is_cut_ends_the_run_on_both_nodes_which_goes_on(nodes, run, expected):
    started, logs = start(nodes, run)
    wait_for(run / "metrics.csv", started[0])
    nodes.cut()
    for index, log in enumerate(logs):
        check_lost(nodes, index, log)
    assert started[0].wait(BOUND) == 1
    nodes.kill(1)  # torchrun itself waits for the lost rendezvous as long as TCP does
    assert not (run / "model").exists()
    nodes.mend()
    check_to_the_end(nodes, run, expected)
