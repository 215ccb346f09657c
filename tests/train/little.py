"""A little of the embedded images, and a configuration that trains on it in a second."""

from pathlib import Path

import torch

from irpe.train.classification.model import build_model
from irpe.train.classification.sources import Part, open_images
from irpe.train.classification.task import Classification
from irpe.train.config import ClassifierConfig
from irpe.train.engine import Trainer, fit, make_accelerator
from irpe.train.logs import Silence
from irpe.train.runs import save_model

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
    repeats=3,
    drop_path=0.1,
    ema_decay=0.9,
    model_args={**CONFIG.model_args, "proj_drop_rate": 0.1},
)


def little(count=48):
    train, val = open_images("embedded")
    return Part(train, range(count), train.classes), Part(val, range(20), val.classes)


def task(config=CONFIG, count=48):
    return Classification(config, *little(count))


def train(directory, config=CONFIG, monitor=None):
    accelerator = make_accelerator(config.precision)
    return fit(task(config), Path(directory), monitor or Silence(), accelerator)


def trainer(directory, config=CONFIG):
    return Trainer(task(config), Path(directory), Silence(), make_accelerator())


def write_run(directory, config=CONFIG):
    """Writes a run whose weights are random, not learned, so that its answers differ."""
    directory = Path(directory)
    directory.mkdir(parents=True)
    (directory / "run.json").write_text(config.to_json())
    torch.manual_seed(config.seed)
    model = build_model(config, 10)
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.4)
    save_model(directory, model)
    return directory
