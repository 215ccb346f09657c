"""A run: its directory, what is in it, and weights that other runs start from.

It holds run.json, the configuration; checkpoint.pt, where the run stands; metrics.csv, a table with
one row per epoch; tensorboard/, curves; and model/, the trained model, once the run has ended.
"""

import csv
import io
import json
import math
import os
import re
import socket
import tempfile
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irpe.errors import MissingFileError, UserError, UserFileError
from irpe.files import (
    free_name,
    read_safetensors,
    read_torch,
    to_safetensors,
    write_bytes,
    write_text,
    write_whole,
)
from irpe.train.config import RUN_FILE, RunConfig, make_task, parse_config

if TYPE_CHECKING:
    from torch import Tensor, nn

    from irpe.train.task import Task

Metrics = Mapping[str, Sequence[float]]
METRICS, CHECKPOINT, MODEL = "metrics.csv", "checkpoint.pt", "model"
TENSORS = f"{MODEL}/model.safetensors"
_FORMAT = 1  # of checkpoints
_EVERY_EPOCH = ("epoch", "train_loss")  # whether it was evaluated or not
HEADS = ("head", "head_dist", "class_labels_classifier")  # which depend on the classes
LOCK = ".lock"
_locked = set[Path]()  # by this process, which its own record locks do not stop
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
        is_new = not self.directory.exists()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory) as file:
                file.write(bytes(4096))  # a full disk takes empty files
                file.flush()
        except OSError as error:
            if is_new:
                with suppress(OSError):
                    self.directory.rmdir()
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

    def save_metrics(self, history: Sequence[Mapping[str, float]]) -> None:
        """Writes the table of epochs."""
        text = io.StringIO()
        names = max(history, key=len).keys()  # an epoch that was not evaluated has fewer
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
        write_text(self.directory / METRICS, text.getvalue())

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


@contextmanager
def lock_run(directory: Path) -> Generator[None]:
    """Holds the lock of a run, or raises an error that names the process that holds it.

    It is a POSIX record lock, which the system releases when its process ends, however it ends;
    forked workers do not inherit it. Across nodes it holds as far as the shared file system passes
    such locks on: NFS does (version 3 with lockd), Lustre if it is mounted with `flock`.
    """
    if os.name != "posix":
        warnings.warn(f"{directory} is not locked: start no second run in it", stacklevel=2)
        yield
        return
    path = (directory / LOCK).resolve()
    if path in _locked:
        raise _in_use(directory, "this process")
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _locked.add(path)
    try:
        _acquire(file, directory)
        yield
    finally:
        _locked.discard(path)
        os.close(file)  # which releases it


def _acquire(file: int, directory: Path) -> None:
    import fcntl

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
        raise _in_use(directory, holder) from None
    except OSError as error:
        warnings.warn(
            f"{directory} cannot be locked ({error.strerror}): start no second run in it",
            stacklevel=2,
        )
        return
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _in_use(directory: Path, holder: str) -> UserError:
    return UserError(
        f"{directory} is in use by a run that is alive ({holder}): wait until it ends, stop it, or "
        "choose another --output"
    )


def read_weights(path: Path) -> "dict[str, Tensor]":
    """Returns the weights in a run, an equipped model or a file; nothing in it is executed."""
    for candidate in (path / "model" / "model.safetensors", path / "model.safetensors"):
        path = candidate if candidate.is_file() else path
    if not path.is_file():
        raise MissingFileError(f"{path} is not a finished run, an equipped model or a file")
    if path.suffix == ".safetensors":
        return read_safetensors(path)
    content = read_torch(path)
    weights: Any = content.get("model", content) if isinstance(content, dict) else content
    if not isinstance(weights, dict):
        raise UserError(f"{path} holds a {type(weights).__name__}, not weights by name")
    return weights


def start_from(
    model: Any, weights: "dict[str, Tensor]", name: str, heads: Sequence[str] = HEADS
) -> None:
    """Fills a model with weights of another size or other classes, as far as they fit.

    The learned absolute encoding is resampled to the new grid, a head for other classes is left
    at its random start, tables that the weights do not have stay zero. All else must fit.

    Args:
        model: The model.
        weights: The weights.
        name: What to call them in errors.
        heads: The paths of layers that depend on the classes.
    """
    own = model.state_dict()
    if "pos_embed" not in own:  # replaced by none or a sinusoid
        weights = {key: value for key, value in weights.items() if key != "pos_embed"}
    elif "pos_embed" in weights and weights["pos_embed"].shape != own["pos_embed"].shape:
        from timm.layers.pos_embed import resample_abs_pos_embed

        size: Any = list(model.patch_embed.grid_size)
        prefix = own["pos_embed"].shape[1] - math.prod(size)
        learned = weights["pos_embed"].float()
        resampled = resample_abs_pos_embed(learned, size, num_prefix_tokens=prefix)
        weights = {**weights, "pos_embed": resampled}
    of_heads = {key for key in own if key.startswith(tuple(f"{head}." for head in heads))}
    fresh = {key for key in of_heads if key in weights and weights[key].shape != own[key].shape}
    fresh |= of_heads - set(weights)
    fresh |= {key for key in own if ".rpe." in key and key not in weights}
    wrong = [key for key in own if key not in fresh and not _fits(weights.get(key), own[key])]
    wrong += [key for key in weights if key not in own]
    if wrong:
        raise UserError(
            f"{name} does not fit the model in {len(wrong)} tensors, the first is {wrong[0]}: "
            f"choose the model and the encoding that it was made with"
        )
    model.load_state_dict({**own, **{k: v for k, v in weights.items() if k not in fresh}})


def _fits(weight: "Tensor | None", own: "Tensor") -> bool:
    if weight is None or weight.shape != own.shape:
        return False
    return weight.dtype == own.dtype or (weight.is_floating_point() and own.is_floating_point())
