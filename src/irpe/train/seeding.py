"""Seeds that follow from the run's seed, the epoch and the step: no random state is saved."""

import random
import zlib
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


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
