"""Feature maps of a backbone that is not trained, made once and kept on disk."""

import hashlib
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.utils.data import Dataset

from irpe.train.detection.annotations.source import BoxSource, Target
from irpe.train.detection.views import BoxBatch, BoxImages, Item, Views
from irpe.train.sampling import Draw, Track, no_track, stream

PLACE = Path.home() / ".cache" / "irpe" / "features"


class FeatureMaps(Dataset[Any]):
    """The counterpart of `BoxImages`: feature maps, and boxes in their pixels.

    Args:
        source: The images.
        items: The versions of each image.
        seed: Chooses the version of a draw; `None` where there is one alone.
        is_cut: Cut a part out of a version for each draw, which costs nothing.
    """

    def __init__(
        self, source: BoxSource, items: list[list[Item]], seed: int | None, is_cut: bool = False
    ) -> None:
        self.source = source
        self.items = items
        self.seed = seed
        self.is_cut = is_cut

    def __getitem__(self, draw: Draw) -> Item:
        versions = self.items[draw.number]
        if self.seed is None:
            return versions[0]
        dice = random.Random(stream(self.seed, draw.epoch, draw.position))
        item = dice.choice(versions)
        return _cut(item, dice) if self.is_cut else item

    def collate(self, items: list[Item]) -> BoxBatch:
        """Returns a batch."""
        return BoxImages.collate(items)


def keep_features(
    backbone: Any,
    source: BoxSource,
    views: Views,
    count: int,
    seed: int | None,
    track: Track = no_track,
    is_cut: bool = False,
) -> FeatureMaps:
    """Returns the feature maps of all images, from disk if they were made before.

    Args:
        backbone: The network, as transformers' DETR calls it.
        source: The images.
        views: How they are shown to it.
        count: How many versions of each image.
        seed: Chooses the version of a draw.
        track: Shows how far it is.
        is_cut: Cut a part out of a version for each draw.
    """
    path = PLACE / f"{_key(backbone, source, views, count)}.safetensors"
    if not path.exists():
        _save(path, _make_features(backbone, source, views, count, track))
    try:
        tensors = safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged: {error}; remove it") from error
    items = [[_item(tensors, number, v) for v in range(count)] for number in range(len(source))]
    return FeatureMaps(source, items, seed, is_cut)


def _make_features(
    backbone: Any, source: BoxSource, views: Views, count: int, track: Track
) -> dict[str, Tensor]:
    images = BoxImages(source, views, seed=0)
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    backbone = backbone.to(device)
    draws = [Draw(v, number, number) for number in range(len(source)) for v in range(count)]
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for draw in track(draws, len(draws), "feature maps"):
            pixels, target, _ = images[draw]
            features = backbone.model(pixels[None].to(device))[-1][0].cpu()
            scale = [features.shape[axis] / pixels.shape[axis] for axis in (2, 1, 2, 1)]
            name = f"{draw.number}.{draw.epoch}"
            tensors[f"{name}.features"] = features.contiguous()
            tensors[f"{name}.boxes"] = target.boxes * torch.tensor(scale)
            tensors[f"{name}.labels"] = target.labels
    return tensors


def _cut(item: Item, dice: random.Random) -> Item:
    """Returns a part of a feature map, half as high and wide at least, with the boxes in it."""
    features, target, number = item
    starts, sizes = zip(*(_window(side, dice) for side in features.shape[1:]), strict=True)
    top, left = starts
    height, width = sizes
    part = features[:, top : top + height, left : left + width]
    room = torch.tensor([width, height, width, height])
    boxes = (target.boxes - torch.tensor([left, top, left, top])).clamp(min=0).minimum(room)
    kept = (boxes[:, :2] < boxes[:, 2:]).all(1)
    return part, Target(boxes[kept], target.labels[kept]), number


def _window(side: int, dice: random.Random) -> tuple[int, int]:
    size = dice.randint(-(-side // 2), side)
    return dice.randint(0, side - size), size


def _item(tensors: dict[str, Tensor], number: int, version: int) -> Item:
    features, boxes, labels = (
        tensors[f"{number}.{version}.{part}"] for part in ("features", "boxes", "labels")
    )
    return features, Target(boxes, labels), number


def _key(backbone: nn.Module, source: BoxSource, views: Views, count: int) -> str:
    """Returns a name that changes with the weights, the images, the boxes and the views."""
    digest = hashlib.sha256(repr((views, count, torch.__version__)).encode())
    digest.update(json.dumps(source.content, sort_keys=True).encode())
    for number in range(len(source)):
        state = os.stat(source.filename(number))
        digest.update(repr((state.st_size, state.st_mtime_ns)).encode())
    for name, tensor in backbone.state_dict().items():
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _save(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".") as scratch:
        written = Path(scratch, path.name)
        safetensors.torch.save_file(tensors, written)
        written.rename(path)
