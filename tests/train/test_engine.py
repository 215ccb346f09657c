"""The loop: stopped and continued anywhere, split in any way, it is the same run."""

import csv
import io
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from train.little import AUGMENTED, CONFIG, little, task, train, trainer
from train.processes import kill_again_and_again, place, start, torchrun
from train.test_sampling import Damaged

from irpe.train.checkpoint import load_checkpoint
from irpe.train.classification.scores import evaluate
from irpe.train.classification.task import Classification
from irpe.train.engine import StoppedError, fit, make_accelerator
from irpe.train.logs import Silence
from irpe.train.runs import load_run, read_config
from irpe.train.sampling import Draw

ROOT = Path(__file__).parents[2]


class StopAt(Silence):
    """Sends a signal to this process after some steps."""

    def __init__(self, step, number=signal.SIGTERM):
        self.at, self.number = step, number

    def step(self, done, loss, num_images):
        if done == self.at:
            os.kill(os.getpid(), self.number)


def same(model, other):
    a, b = model.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("config", [CONFIG, AUGMENTED], ids=["plain", "augmented"])
@pytest.mark.parametrize("stop", [1, 5, 6, 11])
def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path, config, stop):
    whole = train(tmp_path / "whole", config)
    with pytest.raises(StoppedError, match="saved in"):
        train(tmp_path / "run", config, StopAt(stop))
    torch.manual_seed(1234)  # whatever happens in between
    resumed = train(tmp_path / "run", config)
    assert same(whole, resumed)
    assert same(whole, load_run(tmp_path / "run"))
    states = [load_checkpoint(tmp_path / name / "checkpoint.pt") for name in ("whole", "run")]
    moments = [state["optimizer"]["state"] for state in states]
    for index, values in moments[0].items():
        for name, value in values.items():
            assert torch.equal(value, moments[1][index][name])
    rows = [[{**row, "seconds": 0, "images_per_second": 0} for row in s["history"]] for s in states]
    assert rows[0] == rows[1]


def test_an_interrupt_stops_a_run_too_and_the_handlers_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with pytest.raises(StoppedError):
        train(tmp_path / "run", CONFIG, StopAt(2, signal.SIGINT))
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_parts_of_a_batch_add_up_to_the_batch(tmp_path):
    plain = CONFIG.replace(flip=0.0, drop_path=0.0, optimizer="sgd", lr=0.1)
    whole = train(tmp_path / "whole", plain).state_dict()
    parts = train(tmp_path / "parts", plain.replace(device_batch_size=2)).state_dict()
    for name, value in whole.items():
        torch.testing.assert_close(parts[name], value, atol=1e-5, rtol=0, msg=name)


def test_mixed_precision_trains_close_to_single(tmp_path):
    plain = CONFIG.replace(flip=0.0, drop_path=0.0, optimizer="sgd", lr=0.1)
    single = train(tmp_path / "single", plain).state_dict()
    mixed = train(tmp_path / "mixed", plain.replace(precision="bf16")).state_dict()
    assert all(value.dtype == torch.float32 for value in mixed.values())
    assert not torch.equal(mixed["head.weight"], single["head.weight"])
    for name, value in single.items():
        torch.testing.assert_close(mixed[name], value, atol=2e-2, rtol=0, msg=name)


@pytest.mark.slow
def test_a_compiled_run_is_the_run(tmp_path):
    plain = CONFIG.replace(flip=0.0, drop_path=0.0, optimizer="sgd", lr=0.1)
    eager = train(tmp_path / "eager", plain).state_dict()
    compiled = train(tmp_path / "compiled", plain.replace(compile=True)).state_dict()
    for name, value in eager.items():
        torch.testing.assert_close(compiled[name], value, atol=1e-5, rtol=0, msg=name)


def test_a_run_leaves_its_files(tmp_path):
    train(tmp_path / "run", AUGMENTED)
    assert read_config(tmp_path / "run") == AUGMENTED
    with (tmp_path / "run/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert {"lr", "train_loss", "val_loss", "top1", "top5", "seconds"} <= set(rows[0])
    assert list((tmp_path / "run/tensorboard").iterdir())


def test_evaluation_every_second_epoch_and_at_the_end(tmp_path):
    trained = train(tmp_path / "rare", CONFIG.replace(epochs=3, eval_every=2))
    assert same(trained, train(tmp_path / "each", CONFIG.replace(epochs=3)))
    texts = [(tmp_path / run / "metrics.csv").read_text() for run in ("rare", "each")]
    tables = [list(csv.DictReader(io.StringIO(text))) for text in texts]
    rare, each = ([(row["val_loss"], row["top1"]) for row in table] for table in tables)
    assert rare == [("", ""), each[1], each[2]]
    assert [row["train_loss"] for row in tables[0]] == [row["train_loss"] for row in tables[1]]


def test_the_learning_rate_warms_up_and_falls(tmp_path):
    config = CONFIG.replace(epochs=4, warmup_epochs=1, lr=1e-2, warmup_lr=1e-4, min_lr=1e-3)
    rates = []

    class Watch(Silence):
        def step(self, done, loss, num_images):
            rates.append(run._lr())

    run = trainer(tmp_path / "run", config)
    run.monitor = Watch()
    run.run(threading.Event())
    assert rates[0] < rates[3] < rates[6]
    assert 8e-3 < max(rates) < 1e-2  # timm's cosine falls from the start
    assert rates[-1] < 2e-3


def test_tables_have_no_weight_decay(tmp_path):
    run = trainer(tmp_path / "run")
    names = {id(p): name for name, p in run.raw.named_parameters()}
    decay = {
        names[id(p)]: g["weight_decay"] for g in run.optimizer.param_groups for p in g["params"]
    }
    assert all(value == 0 for name, value in decay.items() if ".rpe." in name)
    assert decay["blocks.0.attn.qkv.weight"] == 0.05
    assert sum(".rpe." in name for name in decay) == 6


def test_the_average_is_kept_and_evaluated(tmp_path):
    run = trainer(tmp_path / "run", AUGMENTED)
    assert run.kept_model() is run.average.module
    model = train(tmp_path / "run", AUGMENTED)
    state = load_checkpoint(tmp_path / "run/checkpoint.pt")
    assert not torch.equal(state["model"]["head.weight"], state["average"]["head.weight"])
    assert torch.equal(model.state_dict()["head.weight"], state["average"]["head.weight"])


def test_a_loss_that_is_no_number_stops_with_step_and_files(tmp_path):
    with pytest.raises(FloatingPointError, match=r"epoch \d+, step \d+, on .*idx3-ubyte.xz\[\d+\]"):
        train(tmp_path / "run", CONFIG.replace(lr=1e30, clip_grad=0.0, epochs=20))


@pytest.mark.parametrize(("broken", "limit", "fails"), [({5}, 0.5, False), ({1, 5, 7}, 0.05, True)])
def test_broken_images_up_to_a_fraction(tmp_path, broken, limit, fails):
    source = Damaged(broken, count=48)
    source.classes = little()[0].classes
    config = CONFIG.replace(max_broken=limit, epochs=1)
    real = source.read
    source.read = lambda index: (real(index)[0], index % 10)
    job = Classification(config, source, little()[1])
    if fails:
        with pytest.raises(ValueError, match=r"3 of 48 images cannot be read.*max_broken = 0.05"):
            fit(job, tmp_path / "run", Silence(), make_accelerator())
        return
    fit(job, tmp_path / "run", Silence(), make_accelerator())
    assert load_checkpoint(tmp_path / "run/checkpoint.pt")["broken"] == [5]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"batch_size": 64}, "batch_size = 64 is more than the 48 images"),
        ({"device_batch_size": 3}, "parts of device_batch_size = 3: it must be a multiple of 3"),
        ({"device_batch_size": 1, "mixup": 0.8}, "1 at a time on a device must be even"),
        ({"model": "no_such_model"}, "no_such_model"),
        ({"model_args": {"no_such": 1}}, "no_such"),
        ({"encoding": "product-contextual-z"}, "targets 'z'"),
    ],
)
def test_what_cannot_be_trained(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        train(tmp_path / "run", CONFIG.replace(**changes))
    assert not (tmp_path / "run").exists() or not list((tmp_path / "run").iterdir())


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    train(tmp_path / "run")
    with pytest.raises(ValueError, match="does not fit the configuration"):
        trainer(tmp_path / "run", CONFIG.replace(encoding="none", absolute="keep"))


def test_evaluation_equals_counting_by_hand(tmp_path):
    job = task()
    model = job.build().eval()
    score = evaluate(model, job.val_images, make_accelerator(), batch_size=7)
    hits, hits5, losses = 0, 0, []
    for index in range(20):
        image, label, _, _ = job.val_images[Draw(0, 0, index)]
        logits = model(image[None])[0]
        order = logits.argsort(descending=True).tolist()
        hits += order[0] == label
        hits5 += label in order[:5]
        losses.append((logits.logsumexp(0) - logits[label]).item())
    assert (score.top1, score.top5, score.num_images) == (hits * 5, hits5 * 5, 20)
    assert score.loss == pytest.approx(sum(losses) / 20, rel=1e-5)


def test_broken_images_do_not_count_in_evaluation():
    job = task()
    source = Damaged({1}, count=10)
    job.val_images.source = source
    score = evaluate(job.build(), job.val_images, make_accelerator())
    assert (score.num_images, score.num_broken) == (9, 1)


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
    model = train(tmp_path / "run", SWIN)
    assert same(model, load_run(tmp_path / "run"))
    tables = [p for name, p in model.named_parameters() if ".rpe." in name]
    assert len(tables) == 6
    assert all(bool(table.any()) for table in tables)


def test_weights_that_are_no_numbers_are_not_saved(tmp_path):
    run = trainer(tmp_path / "run")
    run.save()
    with torch.no_grad():
        run.raw.head.bias[0] = float("nan")
    with pytest.raises(FloatingPointError, match="the last checkpoint is untouched"):
        run.save()
    state = load_checkpoint(tmp_path / "run/checkpoint.pt")
    assert bool(state["model"]["head.bias"].isfinite().all())


def test_what_a_killed_run_left_half_written_is_removed(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/.checkpoint.pt.x1y2").write_text("half")
    train(tmp_path / "run")
    assert not list((tmp_path / "run").glob(".checkpoint*"))


def test_too_many_broken_images_in_evaluation_are_an_error():
    job = task()
    job.val_images.source = Damaged({1}, count=10)
    with pytest.raises(ValueError, match=r"1 of 10 images of val cannot be read"):
        job.evaluate(job.build(), make_accelerator())


WITH_WORKERS = """
import sys
from train.little import AUGMENTED, train
train(sys.argv[1], AUGMENTED.replace(epochs=50, workers=1))
"""


def test_a_signal_to_all_processes_of_a_run_with_workers_saves_it(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", WITH_WORKERS, str(tmp_path / "run")],
        env=environment,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "run/metrics.csv").exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    for _ in range(2):  # launchers may send it twice
        os.killpg(process.pid, signal.SIGTERM)
    try:
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert "StoppedError: stopped in epoch" in errors
    assert place(tmp_path / "run/checkpoint.pt") > (0, 0)


SCRIPT = """
import os
import sys
from irpe.train.engine import make_accelerator
from train.little import CONFIG, train
accelerator = make_accelerator()
assert accelerator.num_processes == int(os.environ["WORLD_SIZE"])
config = CONFIG.replace(flip=0.0, drop_path=0.0, epochs=2, batch_size=8)
train(sys.argv[1], config)
accelerator.end_training()
"""


def test_two_processes_train_what_one_trains(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    for count in (1, 2):
        torchrun(count, tmp_path / "script.py", tmp_path / str(count))
    one, two = (load_checkpoint(tmp_path / str(n) / "checkpoint.pt") for n in (1, 2))
    assert one["epoch"] == two["epoch"] == 2  # 12 steps
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, atol=1e-5, rtol=0, msg=name)
    for row_of_one, row_of_two in zip(one["history"], two["history"], strict=True):
        for name in ("top1", "top5"):
            assert row_of_one[name] == row_of_two[name]
        assert row_of_one["train_loss"] == pytest.approx(row_of_two["train_loss"], abs=1e-5)


LONG = """
import sys
from train.little import AUGMENTED, train
train(sys.argv[1], AUGMENTED.replace(epochs=12, save_every=1))
"""


@pytest.mark.slow
def test_kill_9_at_any_moment_damages_nothing_and_loses_a_step_at_most(tmp_path):
    path = tmp_path / "run/checkpoint.pt"
    kill_again_and_again(lambda: start(LONG, tmp_path / "run"), path, 10)
    assert start(LONG, tmp_path / "run").wait() == 0
    assert start(LONG, tmp_path / "whole").wait() == 0
    killed, whole = (load_checkpoint(tmp_path / n / "checkpoint.pt") for n in ("run", "whole"))
    assert place(path) == (12, 0)
    assert all(torch.equal(v, killed["model"][n]) for n, v in whole["model"].items())
    assert all(torch.equal(v, killed["average"][n]) for n, v in whole["average"].items())
    assert [r["top1"] for r in whole["history"]] == [r["top1"] for r in killed["history"]]
