"""The processes of a run: one, or those that torchrun started, as Accelerate sees them."""

import os
from datetime import timedelta

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import InitProcessGroupKwargs
from torch import nn

from irpe.errors import UserError, UserStateError, check_choice
from irpe.extras import require

TIMEOUT_VARIABLE = "IRPE_TIMEOUT"  # seconds
TRACKERS = ("wandb",)  # services of Accelerate's that runs can be logged to
_TIMEOUT = 1800.0  # the first process may prepare the data while the others wait


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
    waiting = InitProcessGroupKwargs(timeout=timedelta(seconds=read_timeout()))
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


def read_timeout() -> float:
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

    Args:
        model: The model, on the accelerator's device.
        accelerator: Knows the processes.
    """
    if accelerator.num_processes == 1:
        return
    for buffer in model.buffers():
        if buffer.is_floating_point():
            torch.distributed.broadcast(buffer, 0)


def in_any_process(is_set: bool, accelerator: Accelerator) -> bool:
    """Tells whether a condition holds in any process, the same in all of them."""
    if accelerator.num_processes == 1:
        return is_set
    flag = torch.tensor(int(is_set), device=accelerator.device)
    return bool(accelerator.reduce(flag, "sum"))  # pyright: ignore[reportArgumentType]
