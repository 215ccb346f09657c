"""Labelled images, wherever they are stored: folders, tar files, idx files, timm's datasets."""

import gzip
import lzma
import math
import os
import struct
import tarfile
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from irpe.errors import MissingFileError, UserError
from irpe.extras import require
from irpe.files import check_regular
from irpe.tasks.classify.config import ClassifierConfig
from irpe.train.config import DATASETS, is_name
from irpe.train.images import (
    SUFFIXES,
    UNREADABLE,
    BrokenImageError,
    held_out_indices,
    read_image,
)

EMBEDDED = Path(__file__).parent / "fashion_mnist"
EMBEDDED_CLASSES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot",
)  # fmt: skip
_SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "test", "t10k"),
}
_SHOWN = 3  # images that are left out, in a warning
_MAX_BYTES = 2**33  # of a compressed file, once it is decompressed


class Source(Protocol):
    """Images that can be read one by one."""

    @property
    def classes(self) -> Sequence[str]:
        """The names of the classes, in the order of the labels."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Returns an image and the index of its class."""
        ...

    def filename(self, index: int) -> str:
        """Returns where an image comes from."""
        ...


class Labels(NamedTuple):
    """The classes of images, by the first folders of their paths."""

    classes: list[str]
    indices: list[int]
    labels: list[int]


class FolderSource:
    """The images of a folder of class folders, in these at any depth."""

    def __init__(self, root: Path) -> None:
        files = [
            os.path.relpath(os.path.join(folder, name), root)
            for folder, _, names in os.walk(root, followlinks=True)
            for name in names
            if name.lower().endswith(SUFFIXES)
        ]
        self.classes, indices, self._labels = label_by_folder(files, str(root))
        self._files = [f"{root}/{files[index]}" for index in indices]

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Returns an image and the index of its class."""
        return read_image(self._files[index]), self._labels[index]

    def filename(self, index: int) -> str:
        """Returns the file of an image."""
        return self._files[index]


class TarSource:
    """The images of a tar file of class folders, or of the folder of these with the tar's name."""

    def __init__(self, path: Path) -> None:
        from timm.data.readers.reader_image_in_tar import ReaderImageInTar

        _check_tar(path)
        self._path = path
        self.reader: Any = ReaderImageInTar(str(path), cache_tarinfo=False)
        files: list[str] = []
        for member, _, inner in self.reader.samples:  # inner: a tar file in it, of one class
            folder = "" if inner is None else os.path.splitext(inner.path)[0]
            files.append(os.path.normpath(f"/{folder}/{member.path}").lstrip("/"))
        top = f"{path.stem}/"
        if all(file.startswith(top) for file in files):
            files = [file.removeprefix(top) for file in files]
        self.classes, self._indices, self._labels = label_by_folder(files, str(path))
        self._files = files

    def __len__(self) -> int:
        return len(self._indices)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Returns an image and the index of its class."""
        try:
            with self.reader[self._indices[index]][0] as file:
                return read_image(file, name=self.filename(index)), self._labels[index]
        except (tarfile.TarError, OSError) as error:
            raise BrokenImageError(f"{self.filename(index)} cannot be read: {error}") from error

    def filename(self, index: int) -> str:
        """Returns the member of the tar file that is an image."""
        return f"{self._path}/{self._files[self._indices[index]]}"


def _check_tar(path: Path) -> None:
    """Raises an error unless a tar file is whole: timm takes what is left of one as all of it."""
    try:
        with tarfile.open(path, "r:") as archive:
            _check_members(archive, path.stat().st_size)
    except (tarfile.TarError, OSError, ValueError, EOFError) as error:
        raise UserError(
            f"{path} is damaged, or not an uncompressed tar file ({error}): write it again with "
            "tar -cf"
        ) from error


def _check_members(archive: tarfile.TarFile, size: int) -> None:
    for member in archive:
        if member.offset_data + member.size > size:
            raise UserError(f"it ends within {member.name}")
        if member.isfile() and member.name.lower().endswith(".tar"):
            with tarfile.open(fileobj=archive.extractfile(member), mode="r:") as inner:
                _check_members(inner, member.size)
    file: Any = archive.fileobj
    file.seek(archive.offset)
    end = file.read(tarfile.BLOCKSIZE)
    if len(end) < tarfile.BLOCKSIZE or any(end):
        raise UserError(f"it has neither a member nor its end at byte {archive.offset}")


def label_by_folder(paths: Sequence[str], where: str) -> Labels:
    """Returns the classes of images; those in no folder are left out, with a warning."""
    from timm.utils.misc import natural_key

    parts = [Path(path).parts for path in paths]
    indices = [index for index, each in enumerate(parts) if len(each) > 1]
    indices.sort(key=lambda index: natural_key(paths[index]))
    classes = sorted({parts[index][0] for index in indices}, key=natural_key)
    numbers = {name: number for number, name in enumerate(classes)}
    stray = sorted(each[0] for each in parts if len(each) == 1)
    if stray:
        shown = ", ".join(stray[:_SHOWN]) + (", ..." if len(stray) > _SHOWN else "")
        warnings.warn(
            f"{where}: {len(stray)} images are in no class folder and are left out ({shown})",
            stacklevel=2,
        )
    return Labels(classes, indices, [numbers[parts[index][0]] for index in indices])


class IdxSource:
    """Grey images in idx files, the format of MNIST, which may be compressed (.gz, .xz).

    Args:
        directory: Where the files are.
        part: The first word of their names, for example "train".
        names: The names of the classes; `None`: the format has none, so labels stand for them.
    """

    def __init__(self, directory: Path, part: str, names: Sequence[str] | None = None) -> None:
        (self.path, self.images), (_, self.labels) = (
            _read_idx(directory, part, kind, ndim) for kind, ndim in (("images", 3), ("labels", 1))
        )
        if self.images.size == 0 or len(self.images) != len(self.labels):
            sizes = " x ".join(map(str, self.images.shape))
            raise UserError(
                f"{self.path} has {sizes} pixels, and there are {len(self.labels)} labels: each "
                "image needs one"
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


def _find_idx(directory: Path, part: str, kind: str) -> list[Path]:
    """Returns the idx files of one kind, "images" or "labels", that start with a word."""
    return sorted(directory.glob(f"{part}-{kind}-idx?-ubyte*"))


def _read_idx(directory: Path, part: str, kind: str, ndim: int) -> tuple[Path, Any]:
    """Returns an idx file and its array: two zeros, type, number of axes, sizes, elements."""
    files = _find_idx(directory, part, kind)
    if len(files) != 1:
        raise MissingFileError(
            f"{directory} has {len(files)} files {part}-{kind}-idx?-ubyte[.gz|.xz]; one is needed"
        )
    path = files[0]
    openers: dict[str, Any] = {".gz": gzip.open, ".xz": lzma.open}
    check_regular(path)
    try:
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
        return path, np.frombuffer(data, np.uint8).reshape(sizes)
    except (OSError, EOFError, ValueError, lzma.LZMAError, struct.error, zlib.error) as error:
        raise UserError(f"{path} is damaged, or not an idx file of {ndim} axes: {error}") from error


class TimmSource:
    """Images of a dataset with a name, which timm reads."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name
        self.reader: Any = getattr(dataset, "reader", None)
        self.classes = self._find_classes()

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Returns an image and the index of its class."""
        try:
            if self.reader is None:
                image, label = self.dataset[index]
                return image, int(label)
            file, label = self.reader[index][:2]
        except UNREADABLE as error:
            raise BrokenImageError(f"{self.filename(index)} cannot be read: {error}") from error
        with file:
            return read_image(file, name=self.filename(index)), int(label)

    def filename(self, index: int) -> str:
        """Returns the file of an image, or its index where it has none."""
        if self.reader is not None:
            try:
                return f"{self.name}/{self.reader.filename(index)}"
            except (AssertionError, AttributeError, NotImplementedError):
                pass
        return f"{self.name}[{index}]"

    def _find_classes(self) -> list[str]:
        indices: dict[str, int] | None = getattr(self.reader, "class_to_idx", None)
        indices = indices or getattr(self.reader, "class_name_to_idx", None)
        if indices:
            return sorted(indices, key=lambda name: indices[name])
        features: Any = getattr(getattr(self.reader, "dataset", None), "features", None)
        names = getattr(self.dataset, "classes", None)
        if names is None and features is not None and "label" in features:
            names = features["label"].names
        if names is None:
            raise UserError(f"{self.name} does not name its classes")
        return [str(name) for name in names]


@dataclass(frozen=True)
class Subset:
    """Some images of a source, with labels that are indices into a given list of classes."""

    source: Source
    indices: Sequence[int]
    classes: Sequence[str]

    def __len__(self) -> int:
        return len(self.indices)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Returns an image and the index of its class."""
        image, label = self.source.read(self.indices[index])
        return image, self.classes.index(self.source.classes[label])

    def filename(self, index: int) -> str:
        """Returns where an image comes from."""
        return self.source.filename(self.indices[index])


def open_images(data: str, root: str | None = None, holdout: float = 0.0) -> tuple[Source, Source]:
    """Returns the images to train on and those to evaluate on, with the same classes.

    Args:
        data: A folder with one folder, tar file or pair of idx files for each of train and val; the
            name of a timm dataset ("torch/cifar10", "hfds/..."); or "embedded".
        root: Where a dataset with a name is stored.
        holdout: The fraction to hold out if there is a single folder of class folders.
    """
    if holdout:
        check_images(data, root, holdout)
        whole = _open_path(Path(data))
        _check_classes(data, whole)
        parts = held_out_indices(len(whole), holdout)
        train, val = (Subset(whole, indices, whole.classes) for indices in parts)
        return train, val
    train, val = open_split(data, "train", root), open_split(data, "val", root)
    _check_classes(data, train)
    unknown = sorted(set(val.classes) - set(train.classes))
    if unknown:
        raise UserError(f"{data}: val has classes that train lacks: {', '.join(unknown[:5])}")
    if list(val.classes) != list(train.classes):
        val = Subset(val, range(len(val)), train.classes)
    return train, val


def open_split(data: str, split: str, root: str | None = None) -> Source:
    """Returns the images of one split, "train" or "val"."""
    _check_root(data, root)
    if data == "embedded":
        part = _SPLITS[split][-1] if split == "val" else split
        return IdxSource(EMBEDDED, part, EMBEDDED_CLASSES)
    if data.startswith(DATASETS):
        return _open_by_name(data, split, root)
    found = _locate(data, split)
    return IdxSource(Path(data), found) if isinstance(found, str) else _open_path(found)


def open_source(config: ClassifierConfig, split: str) -> Source:
    """Returns the images of a run: to train on, or to evaluate on with the classes that it has.

    Evaluated on are those of the split "val" where there are splits, else all images of one folder
    of class folders.
    """
    data, root = config.data, config.root
    if not data:
        raise UserError("--data is missing: the images to evaluate on")
    if config.holdout:
        return open_images(data, root, config.holdout)[split == "val"]
    if split == "train":
        train = open_split(data, split, root)
        _check_classes(data, train)
        return train
    folder = Path(data)
    if is_name(data) or not folder.is_dir() or _has_splits(folder):
        val = open_split(data, "val", root)
    else:
        _check_root(data, root)
        val = _open_path(folder)
    if set(val.classes) < set(config.classes):  # it has no images of some of them
        return Subset(val, range(len(val)), config.classes)
    return val


def describe_val(config: ClassifierConfig) -> str:
    """Returns which images of the data are evaluated on: "held-out", "val" or "all"."""
    if config.holdout:
        return "held-out"
    return "val" if is_name(config.data) or _has_splits(Path(config.data)) else "all"


def check_images(data: str, root: str | None = None, holdout: float = 0.0) -> None:
    """Raises an error if there are no images where `open_split` looks; nothing is read yet."""
    _check_root(data, root)
    if not holdout:
        for split in () if is_name(data) else _SPLITS:
            _locate(data, split)
    elif is_name(data) or _has_splits(Path(data)):
        raise UserError(
            f"--holdout is for one folder of class folders: {data} has splits, leave it out"
        )
    elif not Path(data).exists():
        raise MissingFileError(f"data {data!r} does not exist")


def _check_classes(data: str, train: Source) -> None:
    """Raises an error unless there is something to distinguish."""
    if len(train.classes) < 2:
        names = ", ".join(map(repr, train.classes)) or "none"
        raise UserError(
            f"{data} has fewer than 2 classes: {len(train)} images, such as {train.filename(0)}, "
            f"in {len(train.classes)} ({names}); put the images of each class into a folder of its "
            "own, as in train/cat/1.jpg and train/dog/1.jpg"
        )


def _check_root(data: str, root: str | None) -> None:
    if root is not None and not data.startswith(DATASETS):
        raise UserError(
            f"root {root!r} is for datasets with a name ({'NAME, '.join(DATASETS)}NAME), not for "
            f"data {data!r}: leave it out"
        )


def _has_splits(folder: Path) -> bool:
    """Returns whether a folder has splits: images to train on, or images to evaluate on."""
    return any(_find_split(folder, split) for split in _SPLITS)


def _locate(data: str, split: str) -> Path | str:
    """Returns where a folder has a split, as `_find_split` does, or raises an error."""
    folder = Path(data)
    if not folder.is_dir():
        raise MissingFileError(
            f"data {data!r} is not a folder, a timm dataset ({'NAME, '.join(DATASETS)}NAME) or "
            "'embedded'"
        )
    found = _find_split(folder, split)
    if found is not None:
        return found
    looked_for = ", ".join(f"{name}/, {name}.tar" for name in _SPLITS[split])
    raise MissingFileError(
        f"{data} has no {split} images: looked for {looked_for} and idx files; if it is one folder "
        "of class folders, hold some images out: --holdout 0.2"
    )


def _find_split(folder: Path, split: str) -> Path | str | None:
    """Returns the path of a split, or the first word of its idx files, if it exists."""
    for name in _SPLITS[split]:
        if _find_idx(folder, name, "images"):
            return name
        for path in (folder / name, folder / f"{name}.tar"):
            if path.exists():
                return path
    return None


def _open_by_name(data: str, split: str, root: str | None) -> Source:
    from timm.data.dataset_factory import create_dataset

    if data.startswith("hfds/"):
        require("datasets", "hfds")
    folder = root or str(Path.home() / ".cache" / "irpe" / data.replace("/", "-"))
    options: dict[str, Any] = {"download": True} if data.startswith("torch/") else {}
    for name in _SPLITS[split]:  # datasets name their splits in several ways
        try:
            dataset: Any = create_dataset(data, root=folder, split=name, **options)
        except ValueError:
            continue
        except (RuntimeError, OSError, AssertionError, ImportError) as error:
            raise UserError(f"data {data!r} cannot be opened (root {folder}): {error}") from error
        return TimmSource(dataset, data)
    raise UserError(f"data {data!r} has no split named {' or '.join(_SPLITS[split])}")


def _open_path(path: Path) -> Source:
    try:
        source = TarSource(path) if path.is_file() else FolderSource(path)
    except (OSError, AssertionError) as error:
        raise UserError(f"{path} holds no images in class folders: {error}") from error
    if len(source) == 0:
        raise UserError(f"{path} holds no images in class folders")
    return source
