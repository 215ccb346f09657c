"""A run: its directory, and what is in it.

It holds run.json, the configuration; checkpoint.pt, where the run stands; metrics.csv, a table with
one row per epoch; tensorboard/, curves; and model/, the trained model, once the run has ended.
"""

import csv
import json
import math
import os
import re
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irpe.errors import MissingFileError, UserError, UserFileError
from irpe.files import free_name, to_safetensors, write_bytes, write_text
from irpe.train.config import RUN_FILE, RunConfig, make_task, parse_config
from irpe.train.locks import lock_run

if TYPE_CHECKING:
    from torch import nn

    from irpe.train.task import Task

Metrics = Mapping[str, Sequence[float]]
METRICS, CHECKPOINT, MODEL = "metrics.csv", "checkpoint.pt", "model"
TENSORS = f"{MODEL}/model.safetensors"
_FORMAT = 1  # of checkpoints
_EVERY_EPOCH = ("epoch", "train_loss")  # whether it was evaluated or not
_CELL = re.compile(r"(.+)-\d+-[0-9a-f]{8}")  # the folder of an ablation's run: row, seed, key


class Run:
    """A training run in a directory, which need not exist yet.

    Args:
        directory: The directory.

    Examples:
        >>> import irpe.train
        >>> run = irpe.train.Run("runs/laptop")
        >>> model = run.load()  # doctest: +SKIP
        >>> run.metrics()["top1"]  # doctest: +SKIP
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)

    def __str__(self) -> str:
        return str(self.directory)

    @property
    def exists(self) -> bool:
        """Whether there is a run, or was one."""
        return (self.directory / RUN_FILE).is_file()

    @property
    def has_checkpoint(self) -> bool:
        """Whether there is something to go on from."""
        return (self.directory / CHECKPOINT).exists()

    @property
    def label(self) -> str:
        """What to call it: its row if it is one of an ablation, without the seed."""
        try:
            return str(json.loads((self.directory / "result.json").read_text())["row"])
        except (OSError, ValueError, KeyError, TypeError):
            name = self.directory.resolve().name
            unfinished = _CELL.fullmatch(name)
            return unfinished[1] if unfinished else name

    @cached_property
    def config(self) -> RunConfig:
        """The configuration, as the run began with it."""
        path = self.directory / RUN_FILE
        if not path.is_file():
            raise MissingFileError(f"{path} does not exist: {self} is not a run")
        return parse_config(path.read_text(errors="replace"), path)

    def check_free(self, config: RunConfig) -> None:
        """Raises an error if the directory is taken, which says by what, and names one that is not.

        A run never moves to another folder by itself: the processes of `torchrun` would have to
        agree on it, and a command that is given again after Ctrl-C would start anew silently.

        Args:
            config: The run that is to go there.
        """
        if os.environ.get("RANK", "0") != "0" or not any(self.directory.glob("[!.]*")):
            return  # the first process alone writes to it
        if not self.exists:
            free = free_name(self.directory)
            raise UserError(f"{self} has files of others: choose a new folder, -o {free}")
        try:
            found: dict[str, Any] = dict(json.loads((self.directory / RUN_FILE).read_text()))
        except (OSError, ValueError, TypeError, RecursionError):
            found = {}
        own = config.with_absolute_paths()
        differing = {
            name: Path(str(getattr(own, name))).name
            for name in ("data", "encoding")
            if found.get(name) != getattr(own, name)
        }
        of = f" with other settings ({' and '.join(differing)})" if differing else ""
        raise UserError(
            f"{self} holds a run{of}: go on with that one, --resume {self}, or choose another "
            f"folder, -o {free_name(self.directory, *differing.values())}"
        )

    @contextmanager
    def locked(self) -> Generator[None]:
        """Makes the directory, and has it for this process alone."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass
        except OSError as error:
            raise UserFileError(
                f"{self} cannot be written to: {error.strerror}; choose another --output"
            ) from None
        with lock_run(self.directory):
            for name in (CHECKPOINT, TENSORS):  # what a run that was killed left half written
                for left in (self.directory / name).parent.glob(f".{Path(name).name}.*"):
                    left.unlink()
            yield

    def begin(self, config: RunConfig) -> None:
        """Writes the configuration, or checks that it is the one of the run that is there."""
        config = config.with_absolute_paths()
        if not self.exists:
            write_text(self.directory / RUN_FILE, config.to_json())
            return
        own = self.config.replace(initial=config.initial)  # of no use any more
        if own.to_json() != config.to_json():
            raise UserError(
                f"{self} holds a run with another configuration: go on with --resume, or choose "
                "another --output"
            )

    def save_checkpoint(self, state: dict[str, Any]) -> None:
        """Writes where the run stands: tensors, numbers, strings, and lists and dicts of them."""
        import torch

        from irpe.files import write_whole

        path = self.directory / CHECKPOINT
        try:
            write_whole(path, lambda file: torch.save({"format": _FORMAT, **state}, file))
        except (OSError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserFileError(
                f"the checkpoint {path} could not be written: {reason}; the previous one is "
                "untouched"
            ) from error

    def checkpoint(self) -> dict[str, Any]:
        """Returns what `save_checkpoint` wrote; nothing in the file is executed."""
        from irpe.train.weights import read_torch

        path = self.directory / CHECKPOINT
        if not path.is_file():
            raise MissingFileError(f"{path} does not exist: the run has no checkpoint")
        state = read_torch(path)
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise UserError(f"{path} is not a checkpoint that this release reads")
        return state

    def save_model(self, model: "nn.Module") -> None:
        """Writes the trained model, as `irpe.load_equipped` reads it if it is equipped.

        A detector with a frozen backbone is read by `load` alone: transformers has no such model.
        """
        from irpe.adapters.equip import equipment_of
        from irpe.adapters.saving import save_equipped

        if equipment_of(model):
            save_equipped(model, self.directory / MODEL)
            return
        (self.directory / MODEL).mkdir(exist_ok=True)
        write_bytes(self.directory / TENSORS, to_safetensors(model.state_dict()))

    def open(self) -> "tuple[Task, nn.Module]":
        """Returns the task of the run and its model: the trained one, or that of its checkpoint."""
        from irpe.adapters.saving import check_tensors
        from irpe.train.weights import read_weights

        config = self.config
        if (self.directory / TENSORS).is_file():
            weights = read_weights(self.directory)
        else:
            state = self.checkpoint()
            weights = state["average"] or state["model"]
        task = make_task(config, weights)
        model = task.build()
        check_tensors(model, weights, self.directory)
        model.load_state_dict(weights)
        return task, model.eval()

    def load(self) -> "nn.Module":
        """Returns the model in eval mode: the trained one, or the one of its checkpoint."""
        return self.open()[1]

    def metrics(self) -> dict[str, list[float]]:
        """Returns the columns of the run's table, one value per epoch, NaN if not evaluated."""
        path = self.directory / METRICS
        if not path.is_file():
            is_parent = any(self.directory.glob(f"*/{METRICS}"))
            hint = f"; it contains runs, pass {self}/*" if is_parent else ""
            raise MissingFileError(f"{path} does not exist: {self} is not a training run{hint}")
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


def load_run(directory: str | Path) -> "nn.Module":
    """Returns the model of a run in eval mode: the trained one, or the one of its checkpoint.

    Args:
        directory: The run's directory.

    Examples:
        >>> import irpe.train
        >>> model = irpe.train.load_run("runs/laptop")  # doctest: +SKIP
        >>> irpe.train.load_run("nowhere")
        Traceback (most recent call last):
        ...
        irpe.errors.MissingFileError: nowhere/run.json does not exist: nowhere is not a run
    """
    return Run(directory).load()


def read_metrics(directory: str | Path) -> dict[str, list[float]]:
    """Returns the columns of a run's table, one value per epoch, NaN where it was not evaluated.

    Args:
        directory: The run's directory.

    Examples:
        >>> import irpe.train
        >>> table = irpe.train.read_metrics("runs/laptop")  # doctest: +SKIP
        >>> irpe.train.read_metrics("nowhere")
        Traceback (most recent call last):
        ...
        irpe.errors.MissingFileError: nowhere/metrics.csv does not exist: nowhere is not a ...
    """
    return Run(directory).metrics()


def _value(name: str, cell: str) -> float:
    return math.nan if cell == "" and name not in _EVERY_EPOCH else float(cell)
