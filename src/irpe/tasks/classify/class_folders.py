"""Class folders, and tar files of them: a folder for each class, images in it at any depth."""

import os
import tarfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from irpe.train.image_files import UNREADABLE, BrokenImageError, check_regular
from irpe.train.image_lists import SUFFIXES

_SHOWN = 3  # images that are left out, in a warning


class Labels(NamedTuple):
    """The classes of images, by the first folders of their paths.

    Args:
        classes: The names of the classes.
        indices: Which images have one, in the order of their paths.
        labels: The index of the class of each of these.
    """

    classes: list[str]
    indices: list[int]
    labels: list[int]


class FolderSource:
    """The images of class folders.

    Args:
        root: The folder of class folders.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        files = [
            os.path.relpath(os.path.join(folder, name), root)
            for folder, _, names in os.walk(root, followlinks=True)
            for name in names
            if name.lower().endswith(SUFFIXES)
        ]
        self.classes, indices, self._labels = label_by_folder(files, str(root))
        self._files = [files[index] for index in indices]

    def __len__(self) -> int:
        return len(self._files)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Returns an image and the index of its class."""
        try:
            check_regular(self.filename(index))
            with open(self.filename(index), "rb") as file:
                image = Image.open(file)
                image.load()
        except UNREADABLE as error:
            raise BrokenImageError(f"{self.filename(index)}: {error}") from error
        return image, self._labels[index]

    def filename(self, index: int) -> str:
        """Returns the file of an image."""
        return f"{self._root}/{self._files[index]}"


class TarSource:
    """The images of a tar file of class folders, or of the folder of these with the tar's name.

    Args:
        path: The tar file.
    """

    def __init__(self, path: Path) -> None:
        from timm.data.readers.reader_image_in_tar import ReaderImageInTar

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
                image = Image.open(file)
                image.load()
        except (*UNREADABLE, tarfile.TarError) as error:
            raise BrokenImageError(f"{self.filename(index)}: {error}") from error
        return image, self._labels[index]

    def filename(self, index: int) -> str:
        """Returns the member of the tar file that is an image."""
        return f"{self._path}/{self._files[self._indices[index]]}"


def label_by_folder(paths: Sequence[str], where: str) -> Labels:
    """Returns the classes of images; those in no folder are left out, with a warning.

    Args:
        paths: Where the images are, relative to the folder of class folders.
        where: That folder, to say in the warning.
    """
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
