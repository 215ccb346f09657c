"""Coloured rectangles on grey, and a detector so small that it trains on them in a second."""

import json
import random
from pathlib import Path

import timm
import torch
from PIL import Image, ImageDraw

from irpe.progress import silent
from irpe.tasks.detect.config import DetectorConfig
from irpe.tasks.detect.task import DetectionTask
from irpe.train.engine import train as run_training

COLOURS = {"red": (220, 30, 30), "blue": (30, 30, 220)}
CONFIG = DetectorConfig(
    backbone="resnet10t",
    backbone_weights="none",
    backbone_lr=1e-4,
    encoding="product-contextual-k@2.0",
    model_args={
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "num_queries": 5,
        "dropout": 0.0,
    },
    val_split="train",
    epochs=2,
    warmup_epochs=0,
    batch_size=4,
    save_every=1,
    short_side=96,
    min_short_side=64,
    long_side=160,
    random_crop=False,
)
# Adam makes steps of one size even from gradients that are all noise.
SHARED = CONFIG.replace(optimizer="sgd", lr=1e-2, backbone_lr=1e-3, device_batch_size=1)


def frozen(data):
    """Returns a configuration with feature maps that are kept, of a backbone with weights."""
    path = Path(data) / "backbone.pth"
    if not path.exists():
        torch.manual_seed(0)
        torch.save(timm.create_model(CONFIG.backbone).state_dict(), path)
    return CONFIG.replace(backbone_lr=0.0, cached_versions=2, backbone_weights=str(path))


def make_scenes(root, count=8):
    """Writes a folder in COCO's layout: images of several shapes with 0 to 3 rectangles."""
    dice, images, annotations = random.Random(0), [], []
    (root / "train").mkdir(parents=True)
    (root / "annotations").mkdir()
    for number in range(count):
        width, height = dice.choice([(96, 64), (64, 128), (128, 96)])
        image = Image.new("RGB", (width, height), (128, 128, 128))
        for _ in range(number % 4):
            w, h = dice.randint(16, 40), dice.randint(16, 40)
            x, y = dice.randint(0, width - w), dice.randint(0, height - h)
            label = dice.randint(1, 2)
            ImageDraw.Draw(image).rectangle(
                (x, y, x + w - 1, y + h - 1), fill=list(COLOURS.values())[label - 1]
            )
            box = {"bbox": [x, y, w, h], "area": w * h, "iscrowd": 0, "category_id": label}
            annotations.append({"id": len(annotations) + 1, "image_id": number, **box})
        image.save(root / "train" / f"{number}.png")
        images.append(
            {"id": number, "file_name": f"{number}.png", "width": width, "height": height}
        )
    content = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": 1 + n, "name": name} for n, name in enumerate(COLOURS)],
    }
    (root / "annotations" / "instances_train.json").write_text(json.dumps(content))
    return root


def task(data, config=CONFIG):
    return DetectionTask(config.replace(data=str(data)))


def train(data, directory, config=CONFIG, listen=silent):
    """Returns what a run found."""
    return run_training(config.replace(data=str(data)), directory, listen)
