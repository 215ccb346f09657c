"""The processes of a run, and which of them gets which image when.

They are one, or those that torchrun started, as Accelerate sees them. Seeds follow from the run's
seed, the epoch and the step: no random state is saved.
"""

import os
import random
import signal
import threading
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from timm.data.distributed_sampler import RepeatAugSampler
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from irpe.errors import UserError, UserStateError, check_choice
from irpe.extras import require
from irpe.train.config import RunConfig
from irpe.train.task import Images

TIMEOUT_VARIABLE = "IRPE_TIMEOUT"  # seconds
TRACKERS = ("wandb",)  # services of Accelerate's that runs can be logged to
_TIMEOUT = 1800.0  # the first process may prepare the data while the others wait
_FEW = 10  # steps per epoch; fewer are worth a note
_STOPS = (signal.SIGTERM, signal.SIGINT)


def make_accelerator(
    precision: str = "no", device: str = "auto", log: str | None = None
) -> Accelerator:
    """Returns Accelerate's view of the processes.

    Args:
        precision: Mixed precision: no, bf16 or fp16.
        device: "cpu", the kind of accelerator of this machine ("cuda", ...), or "auto" for that
            accelerator if there is one.
        log: The service that runs are logged to, if any: "wandb".
    """
    AcceleratorState._reset_state()  # else a process keeps the precision of its first run
    found = torch.accelerator.current_accelerator(check_available=True)
    check_choice("device", device, ("auto", "cpu", *([found.type] if found else [])))
    is_cpu = found is None or device == "cpu"
    waiting = InitProcessGroupKwargs(timeout=timedelta(seconds=_read_timeout()))
    if log is not None:
        check_choice("--log", log, TRACKERS)
        require(log, log)  # Accelerate would leave it out without a word
    accelerator = Accelerator(
        mixed_precision=precision, cpu=is_cpu, kwargs_handlers=[waiting], log_with=log
    )
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise UserStateError(
            f"{started} processes were started, but Accelerate sees {accelerator.num_processes}: "
            "they would train separately in one directory; check ACCELERATE_* in the environment"
        )
    return accelerator


def _read_timeout() -> float:
    """Returns the seconds that a process waits for another one before it gives up.

    A node that loses power or its network sends nothing, so that only time can tell.
    """
    text = os.environ.get(TIMEOUT_VARIABLE) or str(_TIMEOUT)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1 <= seconds <= 1e6:
        raise UserError(f"{TIMEOUT_VARIABLE} = {text!r} must be from 1 to 1,000,000 seconds")
    return seconds


def share_buffers(model: nn.Module, accelerator: Accelerator) -> None:
    """Gives a model the buffers of the first process in all of them, as that one saves them.

    Batch norms gather the statistics of their own process's images alone.
    """
    if accelerator.num_processes == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            torch.distributed.broadcast(buffer, 0)


class StoppedError(RuntimeError):
    """A run that was asked to stop, and saved itself."""

    def __init__(self, message: str, number: int = signal.SIGTERM) -> None:
        super().__init__(message)
        self.number = number


class StopRequest(threading.Event):
    """Set when the process is asked to stop; `number` is the signal that asked."""

    number: int = signal.SIGTERM


@contextmanager
def stop_requests() -> Generator[StopRequest]:
    """Turns SIGTERM and SIGINT into a request to stop; a second SIGINT ends the program at once."""
    stopped = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _STOPS}

    def ask(number: int, frame: object) -> None:
        stopped.number = number
        stopped.set()
        if number == signal.SIGINT:  # a launcher may send SIGTERM twice, a user means it
            signal.signal(number, before[number])

    for number in _STOPS:
        signal.signal(number, ask)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        self.sampler, self.epoch, self.batch_size = sampler, epoch, batch_size
        self.first, self.drops_last = first, drops_last

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
    """A sampler that gives each of some images to one process, once."""

    def __init__(self, count: int, num_replicas: int, rank: int) -> None:
        self.num_replicas, self.rank = num_replicas, rank
        self.indices = range(rank, count, num_replicas)

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)


class Part:
    """Some images of others."""

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


def start_loading(loader: DataLoader[Any]) -> Iterator[Any]:
    """Returns the batches of a loader; while its workers start, signals to stop wait."""
    if not hasattr(signal, "pthread_sigmask"):
        return iter(loader)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        return iter(loader)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_process_group(_: int) -> None:
    """Takes a worker out of the run's process group.

    A launcher or a terminal that signals the whole group then stops the run alone, which saves
    itself and ends its workers. What came before, while the worker started, is discarded.
    """
    if hasattr(os, "setsid"):
        os.setsid()
        while signal.sigpending() & set(_STOPS):
            signal.sigwait(_STOPS)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


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
    """Returns how batches of some images are split between processes, and into micro-batches."""
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
    of_process = count // processes
    better = max(of_process // _FEW, min(2, of_process), 1)  # mixup pairs images
    better = processes * 2 ** (better.bit_length() - 1)
    if not steps:
        raise UserError(
            f"batch_size = {config.batch_size} is more than the {count} images: choose a smaller "
            f"one, such as {better}"
        )
    note = None
    if steps < min(_FEW, count // better):
        left = 0 if is_repeated else count - steps * config.batch_size
        lost = f", {left:,} of {count:,} images left out of each" if left else ""
        note = f"{steps} step{'s' * (steps > 1)} per epoch{lost}: --batch-size {better} gives "
        note += str(count // better)
    return Plan(micro_batch, per_process // micro_batch, steps, note)
