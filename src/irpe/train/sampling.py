"""Which image comes when: the samples of an epoch, and the batches that each process gets."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DataLoader, DistributedSampler

from irpe.train.config import RunConfig
from irpe.train.seeding import derive_seed
from irpe.train.task import Images


class Sample(NamedTuple):
    """One image in one epoch.

    Args:
        epoch: The epoch.
        position: Its position in the epoch, counted over all processes.
        image: The index of the image in its source.
    """

    epoch: int
    position: int
    image: int


class Batches:
    """The batches of one process, from some batch of an epoch on.

    Args:
        sampler: The image indices of the process, in order.
        epoch: The epoch.
        batch_size: Images in a batch.
        first: The index of the first batch to take.
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

    def __iter__(self) -> Iterator[list[Sample]]:
        rank, size = self.sampler.rank, self.sampler.num_replicas
        samples = [Sample(self.epoch, rank + size * k, i) for k, i in enumerate(self.sampler)]
        for batch in range(self.first, self.first + len(self)):
            yield samples[batch * self.batch_size : (batch + 1) * self.batch_size]


class EveryImage:
    """A sampler that gives each image to one process, once.

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


class Part:
    """Some images of others.

    Args:
        images: The others.
        indices: Which of them.
    """

    def __init__(self, images: Images, indices: Sequence[int]) -> None:
        self.images, self.indices = images, indices
        self.source, self.facts, self.notes = images.source, images.facts, images.notes

    def __str__(self) -> str:
        return f"a part of {self.images}"

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, sample: Sample) -> Any:
        return self.images[sample._replace(image=self.indices[sample.image])]

    def collate(self, items: list[Any]) -> Any:
        """Returns a batch."""
        return self.images.collate(items)


def train_sampler(count: int, config: RunConfig, num_replicas: int, rank: int, epoch: int) -> Any:
    """Returns the image indices of a process in an epoch, shuffled, repeated if configured."""
    indices: Any = range(count)
    sampler: Any = DistributedSampler(indices, num_replicas, rank, shuffle=True, drop_last=True)
    if config.aug_repeats > 1:
        sampler = RepeatAugSampler(
            indices, num_replicas, rank, num_repeats=config.aug_repeats, selected_round=0
        )
    sampler.set_epoch(derive_seed(config.seed, epoch))
    return sampler


def make_loader(images: Images, batches: Batches, workers: int) -> DataLoader[Any]:
    """Returns a loader of some batches; it leaves torch's random state alone."""
    return DataLoader(
        images,  # pyright: ignore[reportArgumentType]
        batch_sampler=batches,  # pyright: ignore[reportArgumentType]
        collate_fn=images.collate,
        num_workers=workers,
        worker_init_fn=_leave_process_group,
        generator=torch.Generator(),
        pin_memory=torch.cuda.is_available(),
    )


def _leave_process_group(_: int) -> None:
    """Takes a worker out of the run's process group.

    A launcher or a terminal that signals the whole group then stops the run alone, which saves
    itself and ends its workers.
    """
    if hasattr(os, "setsid"):
        os.setsid()
