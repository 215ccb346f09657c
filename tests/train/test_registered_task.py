"""A task that a user registers is trained, resumed, evaluated, ablated and drawn like ours."""

import json

import pytest
import torch
from ablation.small import ROWS
from cli.terminal import irpe
from train.angles import AngleConfig
from train.little import StopAt

import irpe.train as training
from irpe.ablation import Ablation, ablate
from irpe.train.processes import StoppedError

CONFIG = AngleConfig(
    encoding="product-contextual-k", epochs=2, batch_size=4, warmup_epochs=0, save_every=1, lr=1e-2
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("angles") / "run"
    with pytest.raises(StoppedError):
        training.train(CONFIG, folder, StopAt(3))
    return folder, training.train(CONFIG, folder)


def test_it_is_trained_and_resumed(run, tmp_path):
    whole = training.train(CONFIG, tmp_path / "whole")
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, run[1].model.state_dict()[name])
    assert training.read_metrics(run[0])["degrees"][-1] == whole.score.value
    assert "effect" in training.read_metrics(run[0])


def test_it_is_evaluated_and_drawn_by_the_commands(run, tmp_path):
    done = irpe("eval", run[0], "--draw", "2", "-o", tmp_path, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["degrees"] == pytest.approx(run[1].score.value)
    assert len(list(tmp_path.glob("*.png"))) == 3
    done = irpe("show", "training", run[0], "-o", "curves.png", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = irpe("eval", run[0], "--scale", "2", cwd=tmp_path)
    assert (done.returncode, "scale = 2.0" in done.stderr) == (1, True)


def test_it_is_ablated_in_processes_of_their_own(tmp_path):
    report = ablate(Ablation(ROWS, CONFIG, tmp_path / "ablation", seeds=2), jobs=1)
    assert not report.failures
    assert report.rows[0].measure.key == "degrees"
    assert len(report.rows[0].results) == 2
    assert report.table()[0]["degrees"] == report.rows[0].scores()[0]


def test_a_name_that_is_not_a_task_is_refused():
    with pytest.raises(ValueError, match="not of the form"):
        training.register_task("other", "no_class")
