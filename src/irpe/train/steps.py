"""The steps of an epoch: how batches are split, too few of them, and a size that gives more."""

from typing import Any, NamedTuple

from irpe.errors import UserError

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
