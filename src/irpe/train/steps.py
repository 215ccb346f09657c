"""The steps of an epoch: too few of them, and a batch size that gives more."""

_FEW = 10  # steps per epoch; fewer are worth a note


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
