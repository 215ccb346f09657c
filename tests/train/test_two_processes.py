"""Two processes train, evaluate and score what one does.

All of it runs in one start of torchrun, for most of its time goes into imports.
"""

import json

import pytest
import torch
from cli.terminal import irpe
from train import little, scenes, streets
from train.processes import torchrun

from irpe.train.run import Run

RUNS = {name: (f"one-{name}", name) for name in ("classifier", "detector", "segmenter")}
CLASSIFIER = little.CONFIG.replace(flip=0.0, drop_path=0.0)

SCRIPT = """
import os, sys
from contextlib import redirect_stdout
import torch
from train import little, scenes, streets
from train.test_two_processes import CLASSIFIER
from irpe.cli.main import understand
from irpe.train.processes import make_accelerator

data, pixels, folder = sys.argv[1:]
os.chdir(folder)
accelerator = make_accelerator()
rank = accelerator.process_index
assert accelerator.num_processes == int(os.environ["WORLD_SIZE"]) == 2

little.train("classifier", CLASSIFIER)
# 4 images a step: 2 for each process, one at a time
scenes.train(data, "detector", scenes.SHARED)
streets.train(pixels, "segmenter", streets.SHARED)
segformer = streets.train(pixels, "segformer", streets.SEGFORMER.replace(ema_decay=0.5))
torch.save(segformer.model.state_dict(), f"segformer.{rank}")

for name, options in {"classifier": [], "detector": ["-o", "eval", "--batch-size", "1"]}.items():
    with open(f"{name}.{rank}", "w") as file, redirect_stdout(file):
        command, values = understand(["eval", f"one-{name}", "--json", *options])
        command(**values)
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes wrote, beside the runs of one."""
    folder = tmp_path_factory.mktemp("processes")
    data = scenes.make_scenes(folder / "scenes")
    little.train(folder / "one-classifier", CLASSIFIER)
    pixels = streets.make_streets(folder / "streets", count=7)
    scenes.train(data, folder / "one-detector", scenes.SHARED)
    streets.train(pixels, folder / "one-segmenter", streets.SHARED)
    (folder / "script.py").write_text(SCRIPT)
    torchrun(2, folder / "script.py", data, pixels, folder)
    return folder


def test_two_processes_evaluate_and_save_one_model(folder):
    """A Segformer has batch norms, whose statistics are those of a process."""
    one, two = (torch.load(folder / f"segformer.{rank}") for rank in (0, 1))
    assert any(name.endswith("running_mean") for name in one)
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, atol=0, rtol=0, msg=name)


def test_two_processes_train_the_classifier_that_one_trains(folder):
    one, two = (Run(folder / n).checkpoint() for n in RUNS["classifier"])
    assert one["epoch"] == two["epoch"] == 2  # 12 steps
    for name, value in one["model"].items():
        atol = 1e-5 * (CLASSIFIER.table_lr if ".rpe." in name else 1)  # Adam's steps are the rate
        torch.testing.assert_close(two["model"][name], value, atol=atol, rtol=0, msg=name)
    for row_of_one, row_of_two in zip(one["history"], two["history"], strict=True):
        for name in ("top1", "top5"):
            assert row_of_one[name] == row_of_two[name]
        assert row_of_one["train_loss"] == pytest.approx(row_of_two["train_loss"], abs=1e-5)


def test_two_processes_in_micro_batches_train_the_detector_that_one_trains(folder):
    one, two = (Run(folder / n).checkpoint() for n in RUNS["detector"])
    assert one["epoch"] == two["epoch"] == 2
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, atol=2e-5, rtol=0, msg=name)
    for row_of_one, row_of_two in zip(one["history"], two["history"], strict=True):
        assert row_of_one["train_loss"] == pytest.approx(row_of_two["train_loss"], abs=1e-4)


def test_two_processes_in_micro_batches_train_the_segmenter_that_one_trains(folder):
    one, two = (Run(folder / n).checkpoint() for n in RUNS["segmenter"])
    assert one["epoch"] == two["epoch"] == 2
    for name, value in one["model"].items():
        torch.testing.assert_close(two["model"][name], value, atol=2e-5, rtol=0, msg=name)
    for row_of_one, row_of_two in zip(one["history"], two["history"], strict=True):
        assert row_of_one["train_loss"] == pytest.approx(row_of_two["train_loss"], abs=1e-5)
        assert row_of_one["mIoU"] == pytest.approx(row_of_two["mIoU"], abs=0.5)  # few pixels flip


@pytest.mark.parametrize("name", ["classifier", "detector"])
def test_two_processes_evaluate_each_image_once_and_the_first_speaks_alone(folder, name):
    done = irpe("eval", f"one-{name}", "--json", cwd=folder)
    one, two = json.loads(done.stdout), json.loads((folder / f"{name}.0").read_text())
    numbers = {key for key, value in one.items() if isinstance(value, int | float)}
    assert {"num_images"} < numbers
    assert {k: two[k] for k in numbers} == {k: pytest.approx(one[k], abs=1e-5) for k in numbers}
    assert (folder / f"{name}.1").read_text() == ""


def test_two_processes_write_the_detections_of_each_image_once(folder):
    found = json.loads((folder / "eval" / "detections.json").read_text())
    assert len(found) == 8 * scenes.CONFIG.model_args["num_queries"]
