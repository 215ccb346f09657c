"""From images to batches; all randomness follows from the seed, the epoch and the place in it."""

import os
import random
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import timm
import torch
from PIL import Image
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, default_collate

from irpe.train.classification.sources import BrokenImageError, Source
from irpe.train.config import ClassifierConfig, RunConfig

Item = tuple[Tensor, int, int, bool]
Track = Callable[[Iterable[Any], int, str], Iterable[Any]]  # of some work, its length and name
_KEPT_BYTES = 2**28


class Draw(NamedTuple):
    """An image drawn in an epoch.

    Args:
        epoch: The epoch.
        position: Its place among all draws of the epoch, over all processes.
        number: The number of the image.
    """

    epoch: int
    position: int
    number: int


class Batch(NamedTuple):
    """What the model and the loss see.

    Args:
        images: The images.
        labels: Their classes.
        indices: Their numbers in the data.
        broken: Which of them stand for an image that could not be read.
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    broken: Tensor


class Files(Protocol):
    """Images that are somewhere."""

    def __len__(self) -> int: ...

    def filename(self, index: int) -> str:
        """Returns where an image comes from."""
        ...


class Drawn(Protocol):
    """Images as a model sees them, one by one and in batches."""

    @property
    def source(self) -> Files:
        """Where they come from."""
        ...

    def __getitem__(self, draw: Draw) -> Any: ...

    def collate(self, items: list[Any]) -> Any:
        """Returns a batch."""
        ...


class Images(Dataset[Any]):
    """Images of a source as tensors; small ones without augmentation are kept once they are made.

    Args:
        source: The images.
        transform: From an image of Pillow's to a tensor.
        mode: Pillow's name of the colours, "RGB" or "L".
        seed: The seed of the augmentation; `None` if there is none.
    """

    def __init__(
        self, source: Source, transform: Callable[[Any], Tensor], mode: str, seed: int | None
    ) -> None:
        self.source = source
        self.transform = transform
        self.mode = mode
        self.seed = seed
        self.kept: dict[int, Item] = {}

    def __getitem__(self, draw: Draw) -> Item:
        if draw.number in self.kept:
            return self.kept[draw.number]
        image, label, broken = self._read(draw.number)
        image = in_colours(image, self.mode)
        if self.seed is not None:
            with seeded(self.seed, draw.epoch, draw.position):
                return self.transform(image), label, draw.number, broken
        item = self.transform(image), label, draw.number, broken
        if item[0].nbytes * len(self.source) < _KEPT_BYTES:
            self.kept[draw.number] = item
        return item

    def collate(self, items: list[Item]) -> Batch:
        """Returns a batch."""
        return Batch._make(default_collate(items))

    def _read(self, index: int) -> tuple[Any, int, bool]:
        """Returns an image; the next one that can be read, where it cannot."""
        for number in range(index, index + len(self.source)):
            try:
                return *self.source.read(number % len(self.source)), number != index
            except BrokenImageError:
                continue
        raise ValueError(f"none of the {len(self.source)} images can be read")


class Batches:
    """The batches that one process takes, from a place in an epoch on.

    Args:
        sampler: The process's share of the images, in order.
        epoch: The epoch.
        batch_size: Images in a batch.
        first: The number of the first batch to take.
        drops_last: Leave out a last batch that is not full.
    """

    def __init__(
        self, sampler: Any, epoch: int, batch_size: int, first: int = 0, drops_last: bool = True
    ) -> None:
        self.sampler = sampler
        self.epoch = epoch
        self.batch_size = batch_size
        self.first = first
        self.drops_last = drops_last

    def __len__(self) -> int:
        count = len(self.sampler)
        full = count // self.batch_size if self.drops_last else -(-count // self.batch_size)
        return full - self.first

    def __iter__(self) -> Iterator[list[Draw]]:
        rank, size = self.sampler.rank, self.sampler.num_replicas
        draws = [Draw(self.epoch, rank + size * k, i) for k, i in enumerate(self.sampler)]
        for number in range(self.first, self.first + len(self)):
            yield draws[number * self.batch_size : (number + 1) * self.batch_size]


class EveryImage:
    """A share of all images, each taken by one process once.

    Args:
        count: How many images there are.
        num_replicas: How many processes.
        rank: Which of them.
    """

    def __init__(self, count: int, num_replicas: int, rank: int) -> None:
        self.num_replicas, self.rank = num_replicas, rank
        self.indices = range(rank, count, num_replicas)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


def no_track(work: Iterable[Any], count: int, name: str) -> Iterable[Any]:
    """Shows nothing of how far a long work is."""
    return work


def train_sampler(count: int, config: RunConfig, num_replicas: int, rank: int, epoch: int) -> Any:
    """Returns a process's share of an epoch, shuffled, with repeated augmentation if asked for."""
    numbers: Any = range(count)
    if config.repeats > 1:
        sampler: Any = RepeatAugSampler(
            numbers, num_replicas, rank, num_repeats=config.repeats, selected_round=0
        )
        sampler.set_epoch(stream(config.seed, epoch))
        return sampler
    sampler = DistributedSampler(numbers, num_replicas, rank, shuffle=True, drop_last=True)
    sampler.set_epoch(stream(config.seed, epoch))
    return sampler


def make_loader(images: Drawn, batches: Batches, workers: int) -> DataLoader[Any]:
    """Returns the loader of some batches; it takes nothing from torch's random numbers."""
    return DataLoader(
        images,  # pyright: ignore[reportArgumentType]
        batch_sampler=batches,  # pyright: ignore[reportArgumentType]
        collate_fn=images.collate,
        num_workers=workers,
        worker_init_fn=_leave_group,
        generator=torch.Generator(),
        pin_memory=torch.cuda.is_available(),
    )


def every_batch(
    images: Drawn,
    batch_size: int,
    workers: int,
    num_replicas: int = 1,
    rank: int = 0,
    track: Track = no_track,
) -> Iterable[Any]:
    """Returns the batches of a process's share of all images, for evaluation."""
    share = EveryImage(len(images.source), num_replicas, rank)
    batches = Batches(share, 0, batch_size, drops_last=False)
    return track(make_loader(images, batches, workers), len(batches), "evaluation")


def _leave_group(_: int) -> None:
    """Takes a worker out of the run's process group.

    A launcher or a terminal that stops the group then stops the run alone, which saves itself and
    ends its workers.
    """
    if hasattr(os, "setsid"):
        os.setsid()


def train_images(source: Source, config: ClassifierConfig) -> Images:
    """Returns images as they are trained on."""
    is_random = bool(
        config.auto_augment
        or config.color_jitter
        or config.flip
        or config.erasing
        or config.min_scale < 1
    )
    if not is_random:
        return eval_images(source, config.replace(crop=1.0))
    whole = config.min_scale == 1
    try:
        transform: Any = create_transform(
            _input_size(config),
            is_training=True,
            scale=(config.min_scale, 1.0),
            ratio=(1.0, 1.0) if whole else None,
            hflip=config.flip,
            color_jitter=config.color_jitter,
            auto_augment=config.auto_augment or None,
            interpolation="bicubic",
            re_prob=config.erasing,
            re_mode="pixel",
            **_colours(config),
        )
    except (AssertionError, KeyError, ValueError) as error:
        raise ValueError(
            f"auto_augment {config.auto_augment!r} is no policy of timm's, such as "
            f"rand-m9-mstd0.5-inc1: {error!r}"
        ) from error
    return Images(source, transform, _mode(config), config.seed)


def eval_images(source: Source, config: ClassifierConfig) -> Images:
    """Returns images as they are evaluated on."""
    transform: Any = create_transform(
        _input_size(config), crop_pct=config.crop, interpolation="bicubic", **_colours(config)
    )
    return Images(source, transform, _mode(config), None)


def stream(*numbers: int) -> int:
    """Returns a seed that follows from some numbers, another for each."""
    return zlib.crc32(repr(numbers).encode())


@contextmanager
def seeded(*numbers: int) -> Generator[None]:
    """Seeds the random numbers of the CPU inside, and leaves those outside as they were."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = stream(*numbers)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def seed_everything(*numbers: int) -> None:
    """Seeds Python's, NumPy's and torch's random numbers, those of all devices."""
    seed = stream(*numbers)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def in_colours(image: Any, mode: str) -> Any:
    """Returns an image of Pillow's in colours or in grey."""
    if image.mode.startswith("I"):  # 16 bits a pixel, of which Pillow would cut off the rest
        scaled = np.asarray(image).astype(np.float32) / 256
        image = Image.fromarray(scaled.clip(0, 255).astype(np.uint8))
    return image.convert(mode)


def _input_size(config: ClassifierConfig) -> tuple[int, int, int]:
    return config.channels, config.image_size, config.image_size


def _mode(config: ClassifierConfig) -> str:
    return "RGB" if config.channels == 3 else "L"


def _colours(config: ClassifierConfig) -> dict[str, Any]:
    """Returns the mean and deviation that the model is for, averaged for grey images."""
    model: Any = timm.get_pretrained_cfg(config.model)
    if model is None:
        raise ValueError(f"model {config.model!r} is not one of timm's")
    values = {"mean": model.mean, "std": model.std}
    if config.channels == 3:
        return values
    return {name: (sum(colours) / len(colours),) for name, colours in values.items()}
