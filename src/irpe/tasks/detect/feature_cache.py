"""Feature maps of a frozen backbone, computed once and cached on disk."""

import hashlib
import json
import os
import random
from pathlib import Path

import torch
from torch import Tensor

from irpe.errors import UserError
from irpe.files import read_safetensors, to_safetensors, write_bytes
from irpe.progress import Listener, silent, tracked
from irpe.tasks.detect.backbone import FrozenBackbone
from irpe.tasks.detect.boxes import BoxSource, Target
from irpe.tasks.detect.views import BoxImages, Item, Views
from irpe.train.processes import Sample, derive_seed

FOLDER_VARIABLE = "IRPE_FEATURE_CACHE"  # the folder of the cache, if it is another


class FeatureMaps(BoxImages):
    """The counterpart of `BoxImages`: feature maps, with boxes in their coordinates."""

    def __init__(
        self, images: BoxImages, versions: list[list[Item]], seed: int | None, crops: bool = False
    ) -> None:
        super().__init__(images.source, images.views, seed, images.split)
        self.versions, self.crops = versions, crops

    def __getitem__(self, sample: Sample) -> Item:
        versions = self.versions[sample.image]
        if self.seed is None:
            return versions[0]
        dice = random.Random(derive_seed(self.seed, sample.epoch, sample.position))
        item = dice.choice(versions)
        return _crop(item, dice) if self.crops else item


def cached_features(
    backbone: FrozenBackbone,
    images: BoxImages,
    count: int,
    seed: int | None,
    listen: Listener = silent,
    crops: bool = False,
) -> FeatureMaps:
    """Returns the feature maps of all images, from the cache if they are in it."""
    source = images.source
    path = cache_path(backbone, source, images.views, count)
    if not path.exists():
        tensors = _compute(backbone, source, images.views, count, listen)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, to_safetensors(tensors))
    try:
        tensors = read_safetensors(path)
    except ValueError as error:
        raise UserError(f"{error}; remove it") from error
    versions = [[_item(tensors, index, v) for v in range(count)] for index in range(len(source))]
    return FeatureMaps(images, versions, seed, crops)


def cache_path(backbone: FrozenBackbone, source: BoxSource, views: Views, count: int) -> Path:
    """Returns the file of some feature maps: its name follows from all that they depend on.

    These are the weights of the backbone, the images, the boxes, the views and their number.
    """
    digest = hashlib.sha256(repr((views, count, torch.__version__)).encode())
    digest.update(json.dumps(source.content, sort_keys=True).encode())
    for index in range(len(source)):
        state = os.stat(source.filename(index))
        digest.update(repr((state.st_size, state.st_mtime_ns)).encode())
    for name, tensor in backbone.state_dict().items():
        digest.update(name.encode() + tensor.cpu().numpy().tobytes())
    default = Path.home() / ".cache" / "irpe" / "features"
    folder = Path(os.environ.get(FOLDER_VARIABLE) or default)
    return folder / f"{digest.hexdigest()[:16]}.safetensors"


def _compute(
    backbone: FrozenBackbone, source: BoxSource, views: Views, count: int, listen: Listener
) -> dict[str, Tensor]:
    images = BoxImages(source, views, seed=0)
    device = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    backbone = backbone.to(device)
    samples = [Sample(v, index, index) for index in range(len(source)) for v in range(count)]
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for sample in tracked(listen, samples, len(samples), "feature maps"):
            pixels, target, _, is_broken = images[sample]
            features = backbone.feature_map(pixels[None].to(device))[0].cpu()
            scale = [features.shape[axis] / pixels.shape[axis] for axis in (2, 1, 2, 1)]
            name = f"{sample.image}.{sample.epoch}"
            tensors[f"{name}.features"] = features.contiguous()
            tensors[f"{name}.boxes"] = target.boxes * torch.tensor(scale)
            tensors[f"{name}.labels"] = target.labels
            if is_broken:  # these are of another image
                tensors[f"{name}.broken"] = torch.tensor(True)
    return tensors


def _crop(item: Item, dice: random.Random) -> Item:
    """Returns a crop of a feature map, at least half as high and wide, with the boxes in it."""
    features, target, index, is_broken = item
    starts, sizes = zip(*(_interval(side, dice) for side in features.shape[1:]), strict=True)
    top, left = starts
    height, width = sizes
    cropped = features[:, top : top + height, left : left + width]
    bounds = torch.tensor([width, height, width, height])
    boxes = (target.boxes - torch.tensor([left, top, left, top])).clamp(min=0).minimum(bounds)
    inside = (boxes[:, :2] < boxes[:, 2:]).all(1)
    return cropped, Target(boxes[inside], target.labels[inside]), index, is_broken


def _interval(side: int, dice: random.Random) -> tuple[int, int]:
    size = dice.randint(-(-side // 2), side)
    return dice.randint(0, side - size), size


def _item(tensors: dict[str, Tensor], index: int, version: int) -> Item:
    features, boxes, labels = (
        tensors[f"{index}.{version}.{kind}"] for kind in ("features", "boxes", "labels")
    )
    return features, Target(boxes, labels), index, f"{index}.{version}.broken" in tensors
