"""The loop: stopped and resumed anywhere, split in any way, it is the same run."""

import csv
import os
import shutil
import signal
import subprocess

import pytest
import torch
from signatures import prover_of
from train.little import AUGMENTED, CONFIG, Damaged, StopAt, little, task, train, trainer
from train.processes import kill_again_and_again, position, start, wait_for

from irpe.errors import UserError
from irpe.train import engine
from irpe.train.evaluation import evaluate
from irpe.train.processes import StoppedError
from irpe.train.run import Run, load_run, read_metrics

# Without anything random, and with an optimizer that does not amplify rounding.
PLAIN = CONFIG.replace(flip=0.0, drop_path=0.0, optimizer="sgd", lr=0.1)


def same(model, other):
    a, b = model.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def without_times(history):
    return [{**row, "seconds": 0, "images_per_second": 0} for row in history]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A configuration with everything that is random, and an uninterrupted run of it."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    return AUGMENTED, directory, train(directory, AUGMENTED)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """The weights of a run with nothing special."""
    return train(tmp_path_factory.mktemp("single") / "run", PLAIN).model.state_dict()


@pytest.mark.parametrize(("stop", "number"), [(1, signal.SIGTERM), (8, signal.SIGINT)])
def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path, whole, stop, number):
    config, directory, expected = whole
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(StoppedError, match="saved in"):
        train(tmp_path / "run", config, StopAt(stop, number))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    torch.manual_seed(1234)  # whatever happens in between
    resumed = train(tmp_path / "run", config)
    assert same(expected.model, resumed.model)
    assert without_times(expected.history) == without_times(resumed.history)
    assert same(expected.model, load_run(tmp_path / "run"))
    states = [Run(path).checkpoint() for path in (directory, tmp_path / "run")]
    moments = [state["optimizer"]["state"] for state in states]
    for index, values in moments[0].items():
        for name, value in values.items():
            assert torch.equal(value, moments[1][index][name])


def test_a_run_takes_the_implementations_that_it_took_before(tmp_path, monkeypatch):
    """On a GPU they are found by timing, which must not change the bits of a run that goes on."""
    first, second = prover_of(), prover_of()
    first.choices["a call"] = "triton"
    monkeypatch.setattr(engine, "PROVER", first)
    with pytest.raises(StoppedError):
        train(tmp_path / "run", PLAIN, StopAt(1))
    monkeypatch.setattr(engine, "PROVER", second)
    with pytest.raises(StoppedError):
        train(tmp_path / "run", PLAIN, StopAt(2))
    assert second.recorded == {"a call": "triton"}
    state = Run(tmp_path / "run").checkpoint()
    assert state["implementations"] == {"a call": "triton"}


def test_micro_batches_add_up_to_the_batch(tmp_path, single):
    split = train(tmp_path / "run", PLAIN.replace(device_batch_size=2)).model.state_dict()
    for name, value in single.items():
        torch.testing.assert_close(split[name], value, atol=1e-5, rtol=0, msg=name)


def test_mixed_precision_trains_close_to_single(tmp_path, single):
    mixed = train(tmp_path / "mixed", PLAIN.replace(precision="bf16")).model.state_dict()
    assert all(value.dtype == torch.float32 for value in mixed.values())
    assert not torch.equal(mixed["head.weight"], single["head.weight"])
    for name, value in single.items():
        torch.testing.assert_close(mixed[name], value, atol=2e-2, rtol=0, msg=name)


@pytest.mark.slow
def test_a_compiled_run_is_the_run(tmp_path, single):
    compiled = train(tmp_path / "compiled", PLAIN.replace(compile=True)).model.state_dict()
    for name, value in single.items():
        torch.testing.assert_close(compiled[name], value, atol=1e-5, rtol=0, msg=name)


def test_a_run_leaves_its_files_and_returns_what_they_hold(whole):
    config, directory, found = whole
    stored = Run(directory).config
    assert stored == config.replace(classes=stored.classes)
    assert (len(stored.classes), stored.classes[1]) == (10, "trouser")
    with (directory / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert {"lr", "train_loss", "val_loss", "top1", "top5", "seconds"} <= set(rows[0])
    assert [{k: float(v) for k, v in row.items()} for row in rows] == found.history
    assert read_metrics(directory)["top5"] == [row["top5"] for row in found.history]
    assert found.score.value == found.history[-1]["top1"]
    assert list((directory / "tensorboard").iterdir())
    assert not (directory / "wandb").exists()  # it was not asked for


def test_a_run_that_has_ended_returns_its_model_and_history_without_a_score(whole):
    config, directory, found = whole
    (directory / "model/notes").write_text("mine")
    again = train(directory, config)
    assert (directory / "model/notes").read_text() == "mine"
    assert same(again.model, found.model)
    assert (again.history, again.score) == (found.history, None)


def test_evaluation_every_second_epoch_and_at_the_end(tmp_path):
    rare = train(tmp_path / "rare", CONFIG.replace(epochs=3, eval_every=2))
    each = train(tmp_path / "each", CONFIG.replace(epochs=3))
    assert same(rare.model, each.model)
    scores = [[row.get("top1") for row in run.history] for run in (rare, each)]
    assert scores[0] == [None, *scores[1][1:]]
    losses = [[row["train_loss"] for row in run.history] for run in (rare, each)]
    assert losses[0] == losses[1]
    columns = read_metrics(tmp_path / "rare")
    assert [value == value for value in columns["top1"]] == [False, True, True]


def test_the_average_is_saved_and_evaluated(whole):
    config, directory, found = whole
    state = Run(directory).checkpoint()
    assert not torch.equal(state["model"]["head.weight"], state["average"]["head.weight"])
    assert torch.equal(found.model.state_dict()["head.weight"], state["average"]["head.weight"])
    (again,) = evaluate((task(config), found.model))
    assert again.score == found.score


def test_a_loss_that_is_not_finite_stops_with_step_and_files(tmp_path):
    with pytest.raises(FloatingPointError, match=r"epoch \d+, step \d+, on .*idx3-ubyte.xz\[\d+\]"):
        train(tmp_path / "run", CONFIG.replace(lr=1e30, clip_grad=0.0, epochs=20))


@pytest.mark.parametrize(("broken", "limit", "fails"), [({5}, 0.5, False), ({1, 5, 7}, 0.05, True)])
def test_broken_images_up_to_a_fraction(tmp_path, broken, limit, fails):
    config = CONFIG.replace(max_broken=limit, epochs=1)
    sources = Damaged(broken, count=48), little()[1]
    if fails:
        with pytest.raises(ValueError, match=r"3 of 48 images cannot be read.*max_broken = 0.05"):
            train(tmp_path / "run", config, sources=sources)
        return
    train(tmp_path / "run", config, sources=sources)
    assert Run(tmp_path / "run").checkpoint()["broken"] == [5]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 64}, "64"),
        ({"device_batch_size": 3}, "device_batch_size = 3"),
        ({"device_batch_size": 1, "mixup": 0.8}, "mixup"),
        ({"model": "no_such_model"}, "no_such_model"),
        ({"model_args": {"no_such": 1}}, "no_such"),
        ({"model_args": {"num_heads": 0}}, "num_heads = 0"),
        ({"model_args": {"num_heads": 5}}, "num_heads = 5"),
        ({"model_args": {"num_heads": "2"}}, "num_heads = '2'"),
        ({"model_args": {"patch_size": 0}}, "patch_size = 0"),
        ({"model_args": {"patch_size": [7]}}, "'patch_size': [7]"),
        ({"model_args": {"embed_dim": 25}}, "embed_dim = 25"),
        ({"image_size": 1}, "image_size = 1"),
        ({"encoding": "product-contextual-z"}, "'z'"),
    ],
)
def test_what_cannot_be_trained(tmp_path, changes, said):
    with pytest.raises(UserError) as error:
        train(tmp_path / "run", CONFIG.replace(**changes))
    assert said in str(error.value)
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_a_state_that_does_not_fit_is_refused_and_left(tmp_path, whole):
    config, directory, _ = whole
    state = Run(directory).checkpoint()
    run = Run(shutil.copytree(directory, tmp_path / "run"))
    moments = state["optimizer"]
    for change in ({"step": 10**12}, {"model": {}}, {"optimizer": {**moments, "param_groups": []}}):
        run.save_checkpoint({**state, **change})
        before = (tmp_path / "run/checkpoint.pt").read_bytes()
        with pytest.raises(ValueError, match="does not fit its configuration"):
            train(tmp_path / "run", config)
        assert (tmp_path / "run/checkpoint.pt").read_bytes() == before


SWIN = CONFIG.replace(
    model="swin_tiny_patch4_window7_224",
    model_args={"depths": [1, 1], "num_heads": [2, 4], "embed_dim": 16, "window_size": 7},
    encoding="product-contextual-qkv",
    absolute="keep",
    builtin_bias="drop",
    image_size=56,
    channels=3,
    epochs=1,
)


def test_a_swin_without_its_own_bias_trains(tmp_path):
    model = train(tmp_path / "run", SWIN).model
    assert same(model, load_run(tmp_path / "run"))
    tables = [p for name, p in model.named_parameters() if ".rpe." in name]
    assert len(tables) == 6
    assert all(bool(table.any()) for table in tables)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    run = trainer(tmp_path / "run")
    with run.run.locked():
        run.save()
        with torch.no_grad():
            run.raw.head.bias[0] = float("nan")
        with pytest.raises(FloatingPointError, match="the last checkpoint is untouched"):
            run.save()
    state = Run(tmp_path / "run").checkpoint()
    assert bool(state["model"]["head.bias"].isfinite().all())


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/.checkpoint.pt.x1y2").write_text("half")
    (tmp_path / "run/model/.model.safetensors.x1y2").write_text("half")
    with Run(tmp_path / "run").locked():
        pass
    assert not list((tmp_path / "run").glob(".checkpoint*"))
    assert not list((tmp_path / "run/model").iterdir())


def test_a_run_of_another_configuration_is_not_gone_on_with(whole):
    config, directory, _ = whole
    before = (directory / "checkpoint.pt").read_bytes()
    with pytest.raises(ValueError, match="holds a run with another configuration"):
        train(directory, config.replace(lr=0.5))
    assert (directory / "checkpoint.pt").read_bytes() == before


WITH_WORKERS = """
import sys
from signatures import prover_of
from train.little import AUGMENTED, train
train(sys.argv[1], AUGMENTED.replace(epochs=400, workers=1))
"""


def test_a_run_that_is_alive_is_left_alone_and_a_signal_to_all_its_processes_saves_it(tmp_path):
    arguments = "-c", WITH_WORKERS, tmp_path / "run"
    process = start(*arguments, start_new_session=True, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(tmp_path / "run/metrics.csv", process)
        with pytest.raises(UserError, match=f"process {process.pid} on "):
            train(tmp_path / "run", AUGMENTED)
        assert process.poll() is None
        for _ in range(2):  # launchers may send it twice
            os.killpg(process.pid, signal.SIGTERM)
        _, errors = process.communicate(timeout=600)
    finally:
        process.kill()
        process.wait()
    assert "StoppedError: stopped in epoch" in errors
    assert position(tmp_path / "run/checkpoint.pt") > (0, 0)
    assert os.listdir(tmp_path) == ["run"]


LONG = """
import sys
from signatures import prover_of
from train.little import AUGMENTED, train
train(sys.argv[1], AUGMENTED.replace(epochs=24, save_every=1))
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_damages_nothing_and_loses_a_step_at_most(tmp_path):
    path = tmp_path / "run/checkpoint.pt"
    kill_again_and_again(lambda: start("-c", LONG, tmp_path / "run"), path, 10)
    assert start("-c", LONG, tmp_path / "run").wait() == 0
    assert start("-c", LONG, tmp_path / "whole").wait() == 0
    killed, whole = (Run(tmp_path / n).checkpoint() for n in ("run", "whole"))
    assert position(path) == (24, 0)
    assert all(torch.equal(v, killed["model"][n]) for n, v in whole["model"].items())
    assert all(torch.equal(v, killed["average"][n]) for n, v in whole["average"].items())
    assert [r["top1"] for r in whole["history"]] == [r["top1"] for r in killed["history"]]
