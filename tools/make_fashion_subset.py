"""Makes the images that the package ships, from the official files of Fashion-MNIST.

    python tools/make_fashion_subset.py DIRECTORY_WITH_THE_IDX_FILES

The first 600 training and the first 200 test images of each class, in their order, lossless.
"""

import gzip
import lzma
import struct
import sys
from pathlib import Path

import numpy as np

TARGET = Path(__file__).parents[1] / "src/irpe/tasks/classify/fashion_mnist"


def read(path: Path) -> np.ndarray:
    data = gzip.decompress(path.read_bytes())
    ndim = data[3]
    shape = struct.unpack(f">{ndim}I", data[4 : 4 + 4 * ndim])
    return np.frombuffer(data, np.uint8, offset=4 + 4 * ndim).reshape(shape)


def write(path: Path, array: np.ndarray) -> None:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(lzma.compress(header + array.tobytes(), preset=9 | lzma.PRESET_EXTREME))


def main() -> None:
    source = Path(sys.argv[1])
    for part, count in {"train": 600, "t10k": 200}.items():
        labels = read(source / f"{part}-labels-idx1-ubyte.gz")
        images = read(source / f"{part}-images-idx3-ubyte.gz")
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == c)[:count] for c in range(10)]))
        write(TARGET / f"{part}-images-idx3-ubyte.xz", images[chosen])
        write(TARGET / f"{part}-labels-idx1-ubyte.xz", labels[chosen])


main()
