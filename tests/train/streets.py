"""Striped scenes with label maps, in every layout, and a segmenter that trains on them quickly."""

import random
from pathlib import Path

import numpy as np
from PIL import Image

from irpe.progress import silent
from irpe.tasks.segment.config import SegmenterConfig
from irpe.tasks.segment.task import SegmentationTask
from irpe.train.engine import train as run_training

VOID = 3
CLASSES = ("sky", "road", "car")
COLOURS = ((90, 140, 230), (90, 90, 90), (200, 40, 40), (0, 0, 0))  # of the classes and of void


def draw_scene(seed, width=40, height=24):
    """Returns an image and its label map: sky above road, a car on it, a frame of void."""
    dice, labels = random.Random(seed), np.zeros((height, width), np.uint8)
    horizon = dice.randint(height // 3, 2 * height // 3)
    labels[horizon:] = 1
    left = dice.randint(1, width - 12)
    labels[horizon - 4 : horizon + 4, left : left + 10] = 2
    labels[:1] = VOID
    noise = np.random.default_rng(seed).integers(-20, 20, (height, width, 3))
    pixels = np.clip(np.array(COLOURS)[labels] + noise, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels), labels


def make_streets(root, count=8, splits=("train", "val")):
    """Writes a folder in the library's own layout, and returns it."""
    for first, split in enumerate(splits):
        for folder in ("images", "labels"):
            (root / folder / split).mkdir(parents=True)
        for index in range(count):
            image, labels = draw_scene(100 * first + index)
            image.save(root / "images" / split / f"{index}.png")
            Image.fromarray(labels).save(root / "labels" / split / f"{index}.png")
    return Path(root)


CONFIG = SegmenterConfig(
    model="vit_tiny_patch16_224",
    model_args={"patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2},
    encoding="product-contextual-qkv",
    absolute="none",
    ignore_label=VOID,
    crop_height=16,
    crop_width=32,
    color_jitter=0.2,
    epochs=2,
    batch_size=4,
    warmup_epochs=0,
    save_every=1,
)
SEGFORMER = CONFIG.replace(
    model="segformer",
    model_args={
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 1, 2, 2],
        "decoder_hidden_size": 16,
    },
    absolute="keep",
)
# Adam makes steps of one size even from gradients that are all noise.
SHARED = CONFIG.replace(optimizer="sgd", lr=1e-1, device_batch_size=1)


def task(data, config=CONFIG):
    return SegmentationTask(config.replace(data=str(data)))


def train(data, directory, config=CONFIG, listen=silent):
    """Returns what a run found."""
    return run_training(config.replace(data=str(data)), directory, listen)
