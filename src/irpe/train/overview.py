"""What a run is, before it starts, and whether its encoding does anything."""

import os

import torch
from accelerate import Accelerator
from torch import nn

from irpe.adapters.effect import mean_effect, measure_effect
from irpe.train.config import RunConfig
from irpe.train.optim import learns_tables
from irpe.train.sampling import Batches, EveryImage, make_loader
from irpe.train.task import Task

_MEASURED = 16  # validation images
_NAMED = 5  # classes
_RANDOM = {  # what is done to training images: without it, and in words, by the field
    "flip": (0.0, "mirrored with probability {:g}"),
    "min_scale": (1.0, "crops of {:.0%} to 100%"),
    "min_resize": (1.0, "resized by {:g} or more"),
    "auto_augment": ("", "{}"),
    "color_jitter": (0.0, "colour jitter {:g}"),
    "erasing": (0.0, "erasing {:g}"),
    "mixup": (0.0, "mixup {:g}"),
    "cutmix": (0.0, "cutmix {:g}"),
}


def effect_on_images(task: Task, model: nn.Module, accelerator: Accelerator) -> float | None:
    """Returns how much a run's attention changes without its encoding, on some validation images.

    Args:
        task: The task, with its images.
        model: The model, on the accelerator's device.
        accelerator: Knows the device and the precision.

    Returns:
        The mean over the attentions (`irpe.adapters.effect`); `None` without an encoding.
    """
    if task.config.encoding == "none":
        return None
    sampler = EveryImage(len(task.val_images.source), 1, 0)
    batches = Batches(sampler, 0, min(_MEASURED, len(sampler)))
    batch = next(iter(make_loader(task.val_images, batches, 0)))
    with accelerator.autocast():
        return mean_effect(measure_effect(model, **task.model_inputs(batch, accelerator.device)))


def describe_run(task: Task, num_parameters: int, device: torch.device) -> dict[str, str]:
    """Returns what a run is, in words, by the name of each fact.

    Args:
        task: The task, with its data.
        num_parameters: The learned parameters of the model.
        device: Where it is trained.
    """
    config = task.config
    absolute = {"keep": "as the model has it", "none": "none", "sinusoid": "sinusoid"}
    return {
        "model": f"{task.model_name}, {num_parameters:,} parameters",
        "encoding": f"relative {config.encoding}, absolute {absolute[config.absolute]}",
        **describe_data(task),
        "device": describe_device(device),
        "budget": describe_budget(
            config, f"{config.table_lr:g}" if learns_tables(config.encoding) else ""
        ),
    }


def describe_data(task: Task) -> dict[str, str]:
    """Returns the images of a task, what becomes of them, and the classes, in words."""
    classes, config = task.config.classes, task.config
    shape: tuple[int, int, int] | None = getattr(config, "input_shape", None)
    names = ", ".join(classes[:_NAMED]) + (", ..." if len(classes) > _NAMED else "")
    train, val = len(task.images.source), len(task.val_images.source)
    return {
        "images": f"{train:,} to train on, {val:,} to evaluate on ({config.data})",
        **({} if shape is None else {"input": _describe_input(*shape)}),
        "classes": f"{len(classes)}: {names}",
    }


def _describe_input(channels: int, rows: int, columns: int) -> str:
    return f"{rows} x {columns} pixels, {'grey' if channels == 1 else 'colour'}"


def describe_augmentation(config: RunConfig) -> str:
    """Returns what is done at random to training images, in words."""
    found = {name: getattr(config, name, without) for name, (without, _) in _RANDOM.items()}
    used = (name for name, (without, _) in _RANDOM.items() if found[name] != without)
    return ", ".join(_RANDOM[name][1].format(found[name]) for name in used) or "none"


def describe_device(device: torch.device) -> str:
    """Returns a device, its threads and the number of processes, in words."""
    threads = torch.get_num_threads()
    shown = f", {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else ""
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    return f"{device}{shown}{f', {processes} processes' if processes > 1 else ''}"


def describe_budget(config: RunConfig, table_lr: str) -> str:
    """Returns the epochs, the batch and the learning rates of a run, in words.

    Args:
        config: The configuration.
        table_lr: The multiple of the learning rate for tables; nothing where there are none.
    """
    tables = f" ({table_lr} times that for tables)" if table_lr else ""
    return (
        f"{config.epochs} epoch{'s' * (config.epochs > 1)}, batch {config.batch_size}, "
        f"learning rate {config.lr:g}{tables}"
    )
