"""Labelled images, wherever they are stored: folders, tar files, idx files, timm's datasets."""

import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from PIL import Image

from irpe.errors import MissingFileError, UserError
from irpe.extras import require
from irpe.tasks.classify.class_folders import FolderSource, TarSource
from irpe.tasks.classify.config import ClassifierConfig
from irpe.tasks.classify.idx import IdxSource, find_idx
from irpe.train.config import DATASETS, is_name
from irpe.train.image_files import UNREADABLE, BrokenImageError
from irpe.train.image_lists import held_out_indices

EMBEDDED = Path(__file__).parent / "fashion_mnist"
EMBEDDED_CLASSES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot",
)  # fmt: skip
_SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "test", "t10k"),
}


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


class TimmSource:
    """Images of a dataset with a name, which timm reads.

    Args:
        dataset: What `timm.data.create_dataset` returned.
        name: What to call it in errors.
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset = dataset
        self.name = name
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
            with file:
                image = Image.open(file)
                image.load()
        except UNREADABLE as error:
            raise BrokenImageError(f"{self.filename(index)}: {error}") from error
        return image, int(label)

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
    """Some images of a source, with labels that are indices into a given list of classes.

    Args:
        source: All the images.
        indices: The chosen ones.
        classes: The classes, in the order of the labels.
    """

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
        _check_root(data, root)
        _check_whole(data)
        whole = _open_path(Path(data))
        _check_classes(data, whole)
        return hold_out(whole, holdout)
    train, val = open_split(data, "train", root), open_split(data, "val", root)
    _check_classes(data, train)
    unknown = sorted(set(val.classes) - set(train.classes))
    if unknown:
        raise UserError(f"{data}: val has classes that train lacks: {', '.join(unknown[:5])}")
    if list(val.classes) != list(train.classes):
        val = Subset(val, range(len(val)), train.classes)
    return train, val


def hold_out(source: Source, fraction: float) -> tuple[Subset, Subset]:
    """Returns the images to train on and those held out: for a fraction, always the same.

    Args:
        source: All the images.
        fraction: How many of them are held out.
    """
    parts = held_out_indices(len(source), fraction)
    train, val = (Subset(source, indices, source.classes) for indices in parts)
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

    Args:
        config: The configuration.
        split: "train" or "val".
    """
    if not config.data:
        raise UserError("--data is missing: the images to evaluate on")
    if config.holdout:
        return open_images(config.data, config.root, config.holdout)[split == "val"]
    if split == "train":
        train = open_split(config.data, split, config.root)
        _check_classes(config.data, train)
        return train
    val = open_evaluation(config.data, config.root)
    if set(val.classes) < set(config.classes):  # it has no images of some of them
        return Subset(val, range(len(val)), config.classes)
    return val


def describe_val(config: ClassifierConfig) -> str:
    """Returns which images of the data are evaluated on: "held-out", "val" or "all"."""
    if config.holdout:
        return "held-out"
    return "val" if is_name(config.data) or has_splits(Path(config.data)) else "all"


def check_images(data: str, root: str | None = None, holdout: float = 0.0) -> None:
    """Raises an error if there are no images where `open_split` looks; nothing is read yet."""
    _check_root(data, root)
    if holdout:
        _check_whole(data)
    elif not is_name(data):
        for split in _SPLITS:
            _locate(data, split)


def open_evaluation(data: str, root: str | None = None) -> Source:
    """Returns the images to evaluate a trained model on.

    They are those of the split "val" where there are splits, else all images of one folder of
    class folders. Arguments as in `open_images`.
    """
    folder = Path(data)
    if is_name(data) or not folder.is_dir() or has_splits(folder):
        return open_split(data, "val", root)
    _check_root(data, root)
    return _open_path(folder)


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


def _check_whole(data: str) -> None:
    """Raises an error unless data is one folder of class folders, or a tar file of them."""
    if is_name(data) or has_splits(Path(data)):
        raise UserError(
            f"--holdout is for one folder of class folders: {data} has splits, leave it out"
        )
    if not Path(data).exists():
        raise MissingFileError(f"data {data!r} does not exist")


def has_splits(folder: Path) -> bool:
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
        if find_idx(folder, name, "images"):
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
    if path.is_file():
        _check_tar(path)
    try:
        source = TarSource(path) if path.is_file() else FolderSource(path)
    except (OSError, AssertionError, ValueError) as error:
        raise UserError(f"{path} holds no images in class folders: {error}") from error
    if len(source) == 0:
        raise UserError(f"{path} holds no images in class folders")
    return source


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
