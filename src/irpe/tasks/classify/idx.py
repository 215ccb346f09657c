"""The idx format of MNIST: grey images and labels, compressed or not."""

import gzip
import lzma
import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from irpe.errors import MissingFileError, UserError
from irpe.train.image_files import check_regular

_MAX_BYTES = 2**33  # of a compressed file, once it is decompressed


class IdxSource:
    """Grey images in idx files, which may be compressed (.gz, .xz).

    Args:
        directory: Where the files are.
        part: The first word of their names, for example "train".
        names: The names of the classes; `None`: the format has none, so labels stand for them.
    """

    def __init__(self, directory: Path, part: str, names: Sequence[str] | None = None) -> None:
        self.path = _idx_file(directory, part, "images")
        self.images = _read_idx(self.path, ndim=3)
        self.labels = _read_idx(_idx_file(directory, part, "labels"), ndim=1)
        if self.images.size == 0:
            sizes = " x ".join(map(str, self.images.shape))
            raise UserError(f"{self.path} has {sizes} pixels: there is nothing to train on")
        if len(self.images) != len(self.labels):
            raise UserError(
                f"{self.path} has {len(self.images)} images, but {len(self.labels)} labels"
            )
        labels = range(int(self.labels.max()) + 1)
        self.classes = [str(label) for label in labels] if names is None else list(names)

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Returns an image and the index of its class."""
        return Image.fromarray(self.images[index]), int(self.labels[index])

    def filename(self, index: int) -> str:
        """Returns the file and the index of an image."""
        return f"{self.path}[{index}]"


def find_idx(directory: Path, part: str, kind: str) -> list[Path]:
    """Returns the idx files of one kind, "images" or "labels", that start with a word."""
    return sorted(directory.glob(f"{part}-{kind}-idx?-ubyte*"))


def _idx_file(directory: Path, part: str, kind: str) -> Path:
    files = find_idx(directory, part, kind)
    if len(files) != 1:
        raise MissingFileError(
            f"{directory} has {len(files)} files {part}-{kind}-idx?-ubyte[.gz|.xz]; one is needed"
        )
    return files[0]


def _read_idx(path: Path, ndim: int) -> Any:
    """Returns the array of an idx file: two zeros, type, number of axes, sizes, elements."""
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    try:
        check_regular(path)
        with openers.get(path.suffix, open)(path, "rb") as file:
            start: bytes = file.read(4)
            if start != bytes([0, 0, 8, ndim]):
                raise UserError(f"it starts with {start!r}")
            sizes = struct.unpack(f">{ndim}I", file.read(4 * ndim))
            count = math.prod(sizes)
            limit = _MAX_BYTES if path.suffix in openers else path.stat().st_size
            if count > limit:
                raise UserError(f"its sizes {sizes} are {count:,} bytes, more than {limit:,}")
            data: bytes = file.read(count + 1)  # reads to the end, where checksums are compared
        return np.frombuffer(data, np.uint8).reshape(sizes)
    except (OSError, EOFError, ValueError, lzma.LZMAError, struct.error, zlib.error) as error:
        raise UserError(f"{path} is damaged, or not an idx file of {ndim} axes: {error}") from error
