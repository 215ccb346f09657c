"""The directory of a run.

It holds run.json, the configuration; checkpoint.pt, where the run stands; metrics.csv, a table with
one row per epoch; tensorboard/, curves; and model/, the trained model, once the run has ended.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import nn

from irpe.adapters.equip import equipment_of
from irpe.adapters.saving import check_tensors, save_equipped
from irpe.errors import MissingFileError, UserError
from irpe.files import to_safetensors, write_bytes, write_text
from irpe.train.checkpoint import load_checkpoint
from irpe.train.config import RUN_FILE, RunConfig, find_run_file
from irpe.train.configs import Config
from irpe.train.logs import METRICS
from irpe.train.task import build_for, parse_config
from irpe.train.weights import read_weights

Metrics = Mapping[str, Sequence[float]]
CHECKPOINT, MODEL = "checkpoint.pt", "model"
TENSORS = f"{MODEL}/model.safetensors"
_EVERY_EPOCH = ("epoch", "train_loss")  # whether it was evaluated or not


def read_config(directory: Path) -> Config:
    """Returns the configuration of a run."""
    path = find_run_file(directory)
    try:
        return parse_config(path.read_text(), path)
    except ValueError as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def write_config(directory: Path, config: RunConfig) -> None:
    """Writes the configuration of a run, or checks that it is the one of the run that is there."""
    config = config.with_absolute_paths()
    if not (directory / RUN_FILE).exists():
        write_text(directory / RUN_FILE, config.to_json())
        return
    own = read_config(directory).replace(initial=config.initial)  # of no use any more
    if own.to_json() != config.to_json():
        raise UserError(
            f"{directory} holds a run with another configuration: go on with --resume, or choose "
            "another --output"
        )


def remove_remains(directory: Path) -> None:
    """Removes what a run that was killed left half written."""
    for name in (CHECKPOINT, TENSORS):
        for left in (directory / name).parent.glob(f".{Path(name).name}.*"):
            left.unlink()


def read_metrics(directory: str | Path) -> dict[str, list[float]]:
    """Returns the columns of a run's table, one value per epoch, NaN where it was not evaluated.

    Args:
        directory: The run's directory.

    Examples:
        >>> import irpe.train
        >>> table = irpe.train.read_metrics("runs/laptop")  # doctest: +SKIP
    """
    directory = Path(directory)
    path = directory / METRICS
    if not path.is_file():
        is_parent = any(directory.glob(f"*/{METRICS}"))
        hint = f"; it contains runs, pass {directory}/*" if is_parent else ""
        raise MissingFileError(f"{path} does not exist: {directory} is not a training run{hint}")
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = list(csv.DictReader(file, strict=True))
        columns = {name: [_value(name, line[name]) for line in lines] for name in lines[0]}
    except (csv.Error, IndexError, TypeError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path} is damaged or empty: {error}") from error
    missing = [name for name in _EVERY_EPOCH if name not in columns]
    if missing:
        raise UserError(f"{path} has no column {missing[0]!r}")
    return columns


def save_model(directory: Path, model: nn.Module) -> None:
    """Writes the trained model of a run, as `irpe.load_equipped` reads it if it is equipped.

    A detector with a frozen backbone is read by `load_run` alone: transformers has no such model.
    """
    if equipment_of(model):
        save_equipped(model, directory / MODEL)
        return
    (directory / MODEL).mkdir(exist_ok=True)
    write_bytes(directory / TENSORS, to_safetensors(model.state_dict()))


def load_run(directory: str | Path) -> nn.Module:
    """Returns the model of a run in eval mode: the trained one, or the one of its checkpoint.

    Args:
        directory: The run's directory.

    Examples:
        >>> import irpe.train
        >>> model = irpe.train.load_run("runs/laptop")  # doctest: +SKIP
    """
    directory = Path(directory)
    config = read_config(directory)
    if (directory / TENSORS).is_file():
        weights = read_weights(directory)
    else:
        state = load_checkpoint(directory / CHECKPOINT)
        weights = state["average"] or state["model"]
    model = build_for(config, weights)
    check_tensors(model, weights, directory)
    model.load_state_dict(weights)
    return model.eval()


def _value(name: str, cell: str) -> float:
    return math.nan if cell == "" and name not in _EVERY_EPOCH else float(cell)
