"""The processes of a run: one, or those that torchrun started, as Accelerate sees them."""

import os

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState


def make_accelerator(precision: str = "no") -> Accelerator:
    """Returns Accelerate's view of the processes, with a mixed precision: no, bf16 or fp16."""
    AcceleratorState._reset_state()  # else a process keeps the precision of its first run
    is_cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(mixed_precision=precision, cpu=is_cpu)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise RuntimeError(
            f"{started} processes were started, but Accelerate sees {accelerator.num_processes}: "
            "they would train separately in one directory; check ACCELERATE_* in the environment"
        )
    return accelerator


def in_any_process(is_set: bool, accelerator: Accelerator) -> bool:
    """Tells whether a condition holds in any process, the same in all of them."""
    if accelerator.num_processes == 1:
        return is_set
    flag = torch.tensor(int(is_set), device=accelerator.device)
    return bool(accelerator.reduce(flag, "sum"))  # pyright: ignore[reportArgumentType]
