"""A task of a user: how far a bar is turned, on images that are drawn as they are read."""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.nn import functional

from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.task import build_model
from irpe.train import Measure, RunConfig, Score, register_task
from irpe.train.optim import encoder_groups


@dataclass(frozen=True, kw_only=True)
class AngleConfig(RunConfig):
    task: ClassVar[str] = "angles"
    count: int = 16
    absolute_lr: float = 1.0

    @property
    def input_shape(self):
        return 1, 16, 16


class Angles:
    """Bars at angles from 0 to 180 degrees."""

    classes = ()

    def __init__(self, count, first):
        self.angles = [180 * (first + index) / (2 * count) for index in range(0, 2 * count, 2)]

    def __len__(self):
        return len(self.angles)

    def filename(self, index):
        return f"angle {self.angles[index]:g}"

    def read(self, index):
        image, turn = Image.new("L", (16, 16)), math.radians(self.angles[index])
        x, y = 7 * math.cos(turn), 7 * math.sin(turn)
        ImageDraw.Draw(image).line((8 - x, 8 + y, 8 + x, 8 - y), 255, 2)
        return image


class Turned(NamedTuple):
    images: torch.Tensor
    angles: torch.Tensor
    indices: list[int]
    broken: list[int]


class AngleImages:
    facts, notes = {"images": "bars"}, ()

    def __init__(self, source):
        self.source = source

    def __str__(self):
        return "bars"

    def __len__(self):
        return len(self.source)

    def __getitem__(self, sample):
        pixels = torch.tensor(np.asarray(self.source.read(sample.image))[None] / 255)
        return pixels.float(), math.radians(self.source.angles[sample.image]), sample

    def collate(self, items):
        images, angles, samples = zip(*items, strict=True)
        indices = [sample.image for sample in samples]
        return Turned(torch.stack(images), torch.tensor(angles), indices, [])


class AngleTask:
    Config, takes, eval_batch = AngleConfig, (), 8
    measures = (Measure("degrees", "mean error", "°", higher_is_better=False, digits=1),)

    def __init__(self, config, weights=None):
        self.config = config

    def open(self, split, condition, listen=None):
        return AngleImages(Angles(self.config.count, split == "val"))

    def build(self, size=None):
        own = {"encoding": self.config.encoding, "absolute": self.config.absolute}
        arguments = {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
        model = "vit_tiny_patch16_224"
        config = ClassifierConfig(model=model, image_size=16, channels=1, model_args=arguments)
        return build_model(config.replace(**own), 2)

    def groups(self, model):
        return encoder_groups(model, self.config, self.config.absolute_lr)

    def losses(self, model, batches, accelerator):
        for batch in batches:
            target = torch.stack([(2 * batch.angles).sin(), (2 * batch.angles).cos()], 1)
            yield functional.mse_loss(model(batch.images), target)

    def predict(self, model, batch, device):
        sine, cosine = model(batch.images).unbind(1)
        return (torch.atan2(sine, cosine).rad2deg() / 2 % 180).tolist()

    def score(self, images, predictions):
        pairs = [(images.source.angles[index], found) for index, found in predictions.items()]
        errors = tuple(abs((found - true + 90) % 180 - 90) for true, found in pairs)
        return Score(self.measures, {"degrees": sum(errors) / len(errors)}, errors)

    def draw(self, images, index, prediction, threshold=None):
        image, turn = images.source.read(index), math.radians(prediction)
        ImageDraw.Draw(image).line((8, 8, 8 + 7 * math.cos(turn), 8 - 7 * math.sin(turn)), 128)
        return image


register_task("angles", "train.angles:AngleTask")
