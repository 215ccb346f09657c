"""A little of the embedded images, and a configuration that trains on it in a second."""

import os
import signal
from pathlib import Path

import torch

from irpe.progress import silent
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.sources import Subset, open_images
from irpe.tasks.classify.task import ClassificationTask, build_model
from irpe.train.engine import Trainer
from irpe.train.images import BrokenImageError
from irpe.train.processes import make_accelerator
from irpe.train.run import Run

CONFIG = ClassifierConfig(
    model="vit_tiny_patch16_224",
    model_args={"patch_size": 7, "embed_dim": 16, "depth": 2, "num_heads": 2},
    encoding="product-contextual-qkv",
    absolute="none",
    image_size=28,
    channels=1,
    crop=1.0,
    epochs=2,
    batch_size=8,
    warmup_epochs=0,
    save_every=3,
)
AUGMENTED = CONFIG.replace(
    flip=0.5,
    min_scale=0.5,
    erasing=0.25,
    mixup=0.8,
    cutmix=1.0,
    aug_repeats=3,
    drop_path=0.1,
    ema_decay=0.9,
    model_args={**CONFIG.model_args, "proj_drop_rate": 0.1},
)


def little(count=48):
    train, val = open_images("embedded")
    return Subset(train, range(count), train.classes), Subset(val, range(20), val.classes)


class Damaged:
    """Images of which some cannot be read."""

    def __init__(self, broken, count=4):
        self.broken, self.count = broken, count
        self.source, _ = little()
        self.classes = self.source.classes

    def __len__(self):
        return self.count

    def read(self, index):
        if index in self.broken:
            raise BrokenImageError(str(index))
        return self.source.read(index)[0], index % 10

    def filename(self, index):
        return str(index)


class StopAt:
    """Sends a signal to this process after some steps."""

    def __init__(self, step, number=signal.SIGTERM):
        self.at, self.number = step, number

    def __call__(self, event):
        if event.work == "training" and event.done == self.at:
            os.kill(os.getpid(), self.number)


def task(config=CONFIG, count=48, sources=None):
    job = ClassificationTask(config)
    job.sources = dict(zip(("train", "val"), sources or little(count), strict=True))
    return job


def train(directory, config=CONFIG, listen=silent, sources=None):
    """Returns what a run found."""
    accelerator = make_accelerator(config.precision)
    return Trainer(task(config, sources=sources), Run(directory), accelerator, listen).fit()


def trainer(directory, config=CONFIG):
    return Trainer(task(config), Run(directory), make_accelerator())


def write_run(directory, config=CONFIG):
    """Writes a run whose weights are random, not learned, so that its answers differ."""
    directory = Path(directory)
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(config.to_json())
    torch.manual_seed(config.seed)
    model = build_model(config, 10)
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.4)
    Run(directory).save_model(model)
    return directory
