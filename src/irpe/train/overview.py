"""What a run is, in words, before it starts."""

import os

import torch

from irpe.train.config import RunConfig
from irpe.train.optim import learns_tables
from irpe.train.task import Images

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


def describe_run(
    config: RunConfig, train: Images, val: Images, num_parameters: int, device: torch.device
) -> dict[str, str]:
    """Returns what a run is, in words, by the name of each fact."""
    absolute = "as the model has it" if config.absolute == "keep" else config.absolute
    threads, processes = torch.get_num_threads(), int(os.environ.get("WORLD_SIZE", "1"))
    shown = f", {threads} thread{'s' * (threads > 1)}" if device.type == "cpu" else ""
    return {
        "model": f"{config.title}, {num_parameters:,} parameters",
        "encoding": f"relative {config.encoding}, absolute {absolute}",
        **describe_data(config, train, val),
        "device": f"{device}{shown}{f', {processes} processes' if processes > 1 else ''}",
        "budget": describe_budget(
            config, f"{config.table_lr:g}" if learns_tables(config.encoding) else ""
        ),
    }


def describe_data(config: RunConfig, train: Images, val: Images) -> dict[str, str]:
    """Returns the images of a run, what becomes of them, and the classes, in words."""
    classes, shape = config.classes, config.input_shape
    names = ", ".join(classes[:_NAMED]) + (", ..." if len(classes) > _NAMED else "")
    facts = {"images": f"{len(train):,} to train on, {len(val):,} to evaluate on ({config.data})"}
    if shape is not None:
        colours = "grey" if shape[0] == 1 else "colour"
        facts["input"] = f"{shape[1]} x {shape[2]} pixels, {colours}"
    return {**facts, **({"classes": f"{len(classes)}: {names}"} if classes else {})}


def describe_augmentation(config: RunConfig) -> str:
    """Returns what is done at random to training images, in words."""
    found = {name: getattr(config, name, without) for name, (without, _) in _RANDOM.items()}
    used = (name for name, (without, _) in _RANDOM.items() if found[name] != without)
    return ", ".join(_RANDOM[name][1].format(found[name]) for name in used) or "none"


def describe_budget(config: RunConfig, table_lr: str) -> str:
    """Returns the epochs, the batch and the learning rates of a run, in words."""
    tables = f" ({table_lr} times that for tables)" if table_lr else ""
    return (
        f"{config.epochs} epoch{'s' * (config.epochs > 1)}, batch {config.batch_size}, "
        f"learning rate {config.lr:g}{tables}"
    )
