"""Which image comes when: seeds, the samples of an epoch, how batches are split, and loaders.

Seeds follow from the run's seed, the epoch and the step: no random state is saved.
"""

import os
import random
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.data.distributed_sampler import RepeatAugSampler
from torch.utils.data import DataLoader, DistributedSampler

from irpe.errors import UserError
from irpe.train.config import RunConfig
from irpe.train.task import Images


def derive_seed(*numbers: int) -> int:
    """Returns a seed that follows from some integers, a different one for each sequence."""
    return zlib.crc32(repr(numbers).encode())


@contextmanager
def seeded(*numbers: int) -> Generator[None]:
    """Seeds the random generators of the CPU inside, and restores their states afterwards."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed = derive_seed(*numbers)
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
    """Seeds the random generators of Python, NumPy and torch, those of all devices."""
    seed = derive_seed(*numbers)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


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


_FEW = 10  # steps per epoch; fewer are worth a note


class Plan(NamedTuple):
    """How the batch of a step is split.

    Args:
        micro_batch: Images per forward pass and process.
        num_micro_batches: How many of them make a step.
        steps: The steps of an epoch.
        note: What to say of it.
    """

    micro_batch: int
    num_micro_batches: int
    steps: int
    note: str | None


def plan_batches(config: Any, count: int, processes: int) -> Plan:
    """Returns how batches are split between processes, and into micro-batches.

    Args:
        config: The configuration of the run.
        count: How many images there are.
        processes: How many processes.
    """
    per_process, rest = divmod(config.batch_size, processes)
    micro_batch = min(config.device_batch_size or per_process, per_process)
    if rest or per_process % micro_batch:
        raise UserError(
            f"batch_size = {config.batch_size} cannot be split between {processes} processes in "
            f"micro-batches of device_batch_size = {micro_batch}: it must be a multiple of "
            f"{processes * micro_batch}"
        )
    config.check_forward(micro_batch)
    is_repeated = config.aug_repeats > 1  # whose sampler fills the last round up
    steps = (-(-count // processes) if is_repeated else count // processes) // per_process
    if not steps:
        raise UserError(
            f"batch_size = {config.batch_size} is more than the {count} images: choose a smaller "
            f"one, such as {suggest_batch_size(count, processes)}"
        )
    of_batch = config.batch_size, processes, config.aug_repeats
    note = note_few_steps(steps, count, *of_batch)
    return Plan(micro_batch, per_process // micro_batch, steps, note)


def suggest_batch_size(count: int, processes: int = 1) -> int:
    """Returns a batch size that gives 10 steps per epoch or more, where there are enough images.

    Args:
        count: How many images there are.
        processes: How many processes split a batch; each gets a power of two.
    """
    of_process = count // processes
    most = max(of_process // _FEW, min(2, of_process), 1)  # mixup pairs images
    return processes * 2 ** (most.bit_length() - 1)


def note_few_steps(
    steps: int, count: int, batch_size: int, processes: int = 1, aug_repeats: int = 1
) -> str | None:
    """Returns what to say of a run with few steps per epoch; nothing if there are enough.

    Args:
        steps: The steps of an epoch.
        count: The images to train on.
        batch_size: The images of a step.
        processes: How many processes split a batch.
        aug_repeats: How often an image comes in an epoch.
    """
    if steps >= _FEW:
        return None
    left = count - steps * batch_size
    said = f"{steps} step{'s' * (steps > 1)} per epoch"
    if left and aug_repeats == 1:
        said += f", {left:,} of {count:,} images left out of each"
    better = suggest_batch_size(count, processes)
    if better >= batch_size:
        return f"{said}: more --epochs help"
    return f"{said}: --batch-size {better} gives {count // better}"
