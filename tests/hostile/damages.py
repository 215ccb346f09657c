"""Damaged copies of every file format that the library reads: bit flips and cuts.

Each must end in a clear error, or in an equal result. Where a format has no checksum, a flipped bit
may also give another valid file, which no reader can know; what must not happen is any error that
is not one of ours.
"""

import gzip
import lzma
import tarfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from adapters.small_models import make_vit
from hostile.cases import CLEAR, Case
from PIL import Image
from train.boxed import make_coco, make_voc, voc_object, voc_text

import irpe
from irpe.files import read_safetensors, to_safetensors
from irpe.models.layout import read_checkpoint
from irpe.recipes import RECIPES
from irpe.tasks.classify.sources import open_split
from irpe.tasks.detect.boxes import open_boxes
from irpe.train.config import RUN_FILE
from irpe.train.run import Run, read_metrics


@dataclass
class Format:
    """A file format.

    Args:
        make: Writes a valid example into a folder and returns the file that is damaged.
        read: Reads the folder and returns values that can be compared.
        has_checksum: Whether every flipped bit is found.
        has_end: Whether every cut is found.
    """

    make: Callable[[Path], Path]
    read: Callable[[Path], Any]
    has_checksum: bool = False
    has_end: bool = True
    whole: dict[Path, tuple[Path, bytes, Any]] = field(default_factory=dict)

    def check(self, folder: Path, damage: Callable[[bytes], bytes], is_cut: bool) -> str:
        """Damages a copy, reads it, and repairs it again."""
        if folder not in self.whole:
            folder.mkdir(parents=True)
            path = self.make(folder)
            self.whole[folder] = path, path.read_bytes(), self.read(folder)
        path, content, expected = self.whole[folder]
        try:
            path.write_bytes(damage(content))
            found = self.read(folder)
        except CLEAR as error:
            return "refused" if str(error) else f"{type(error).__name__} without a message"
        finally:
            path.write_bytes(content)
        is_found = self.has_end if is_cut else self.has_checksum
        return "equal" if found == expected or not is_found else "another result, silently"


def _tensors():
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{n}": torch.randn(4, 5, generator=generator) for n in range(3)}


def _values(tensors):
    return {name: tensor.tolist() for name, tensor in tensors.items()}


def _make_checkpoint(folder):
    state = {
        "model": _tensors(),
        "average": None,
        "optimizer": {"state": {}, "param_groups": []},
        "scaler": None,
        "epoch": 1,
        "step": 2,
        "sum_of_losses": 0.5,
        "history": [{"epoch": 1, "train_loss": 2.5}],
        "broken": [],
    }
    Run(folder).save_checkpoint(state)
    return folder / "checkpoint.pt"


def _read_checkpoint(folder):
    return _values(Run(folder).checkpoint()["model"])


def _make_safetensors(folder):
    (folder / "model.safetensors").write_bytes(to_safetensors(_tensors()))
    return folder / "model.safetensors"


def _read_safetensors(folder):
    return _values(read_safetensors(folder / "model.safetensors"))


def _make_equipped(name):
    def make(folder):
        irpe.save_equipped(irpe.equip(make_vit(), "product-bias-k"), folder / "model")
        return folder / "model" / name

    return make


def _read_equipped(folder):
    return _values(irpe.load_equipped(folder / "model").state_dict())


def _make_run(folder):
    (folder / RUN_FILE).write_text(RECIPES["laptop"]().to_json())
    return folder / RUN_FILE


def _make_metrics(folder):
    (folder / "metrics.csv").write_text("epoch,train_loss,top1\n1,2.5,10.0\n2,2.25,20.5\n")
    return folder / "metrics.csv"


def _idx(array):
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()


def _make_idx(ending, compress):
    def make(folder):
        random = np.random.default_rng(0)
        pixels = random.integers(0, 256, (4, 6, 5), dtype=np.uint8)
        (folder / "train-labels-idx1-ubyte").write_bytes(_idx(np.arange(4, dtype=np.uint8)))
        path = folder / f"train-images-idx3-ubyte{ending}"
        path.write_bytes(compress(_idx(pixels)))
        return path

    return make


def _read_images(folder):
    source = open_split(str(folder), "train")
    try:
        images = [source.read(index) for index in range(len(source))]
        return list(source.classes), [(image.tobytes(), label) for image, label in images]
    finally:
        state = getattr(getattr(source, "reader", None), "tar_state", None)
        if state is not None and state.tf is not None:
            state.tf.close()


def save_pictures(folder, ending, count=2):
    """Writes noise in two classes, `count` images each."""
    random = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            pixels = random.integers(0, 256, (8, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.{ending}")


def _make_picture(ending):
    def make(folder):
        save_pictures(folder / "train", ending)
        return folder / "train" / "cat" / f"1.{ending}"

    return make


def _make_tar(folder):
    save_pictures(folder / "pictures", "png")
    with tarfile.open(folder / "train.tar", "w") as archive:
        archive.add(folder / "pictures", arcname=".")
    return folder / "train.tar"


def _make_voc(name):
    def make(folder):
        make_voc(folder, {"a": voc_text(voc_object("cat", (1, 2, 30, 20)))})
        return folder / name

    return make


def _read_boxes(folder):
    source = open_boxes(str(folder), "train")
    return source.content, source.classes


def _make_published(folder):
    torch.save({"model": _tensors(), "epoch": 1}, folder / "authors.pth")
    return folder / "authors.pth"


FORMATS = {
    "checkpoint.pt": Format(_make_checkpoint, _read_checkpoint, has_checksum=True),
    "safetensors": Format(_make_safetensors, _read_safetensors, has_checksum=True),
    "equipped irpe.json": Format(_make_equipped("irpe.json"), _read_equipped, has_checksum=True),
    "equipped safetensors": Format(
        _make_equipped("model.safetensors"), _read_equipped, has_checksum=True
    ),
    "run.json": Format(_make_run, lambda folder: Run(folder).config, has_checksum=True),
    "metrics.csv": Format(_make_metrics, lambda f: read_metrics(f), has_end=False),
    "idx": Format(_make_idx("", bytes), _read_images),
    "idx.gz": Format(_make_idx(".gz", gzip.compress), _read_images, has_checksum=True),
    "idx.xz": Format(_make_idx(".xz", lzma.compress), _read_images, has_checksum=True),
    "tar": Format(_make_tar, _read_images),
    "png": Format(_make_picture("png"), _read_images, has_checksum=True),
    "jpeg": Format(_make_picture("jpg"), _read_images),
    "COCO json": Format(lambda f: make_coco(f), _read_boxes),
    "VOC xml": Format(_make_voc("Annotations/a.xml"), _read_boxes),
    "VOC list": Format(_make_voc("ImageSets/Main/train.txt"), _read_boxes, has_end=False),
    "authors' pth": Format(_make_published, lambda f: sorted(read_checkpoint(f / "authors.pth"))),
}


def _flip(position, bit):
    def damage(content):
        damaged = bytearray(content)
        damaged[position % len(content)] ^= 1 << bit
        return bytes(damaged)

    return damage


def _cut(position):
    return lambda content: content[: position % len(content)]


def cases(seed, count, folder, names=tuple(FORMATS)):
    """Yields `count` damaged copies of each format; half of them are flips, half cuts."""
    for name in names:
        random = np.random.default_rng([seed, len(name)])
        place = folder / name.replace(" ", "-").replace("'", "")
        for number in range(count):
            position, bit = int(random.integers(2**31)), int(random.integers(8))
            is_cut = number % 2 == 1
            damage = _cut(position) if is_cut else _flip(position, bit)
            check = partial(FORMATS[name].check, place, damage, is_cut)
            yield Case(f"{name} {'cut' if is_cut else 'flip'} {position} {bit}", check)
