"""What a run writes as it goes: a table of epochs (CSV), curves for TensorBoard and for W&B."""

import csv
import dataclasses
import io
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irpe.extras import require
from irpe.files import write_text
from irpe.train.config import RunConfig
from irpe.train.run import METRICS

if TYPE_CHECKING:
    from accelerate import Accelerator

PROJECT = "irpe"  # the project of runs in a service that they are logged to
_TRACKED = Path("wandb") / "id"  # the name that such a service has for a run


class Logs:
    """The logs of a run; the first process alone writes them.

    Args:
        directory: The run's directory.
        config: The run's configuration.
        done: The steps that are done: what an interrupted run logged after them is discarded.
        accelerator: Knows the process, and the services that the run is logged to.
    """

    def __init__(
        self, directory: Path, config: RunConfig, done: int, accelerator: "Accelerator"
    ) -> None:
        self.directory, self.done, self.accelerator = directory, done, accelerator
        self.board: Any = None
        if not accelerator.is_main_process:
            return
        require("tensorboard", "train")
        from torch.utils.tensorboard import SummaryWriter

        self.board = SummaryWriter(str(directory / "tensorboard"), purge_step=done + 1)
        if accelerator.log_with:
            self._start_trackers(config)

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *error: object) -> None:
        if self.board is not None:
            self.board.close()
            for tracker in self.accelerator.trackers:
                tracker.finish()

    def step(self, done: int, loss: float, lr: float) -> None:
        """Logs the loss and the learning rate of a step."""
        self.done = done
        self._log("step", {"loss": loss, "lr": lr}, done)

    def epoch(self, history: list[dict[str, float]]) -> None:
        """Logs the last epoch, and writes the table of all epochs so far."""
        if self.board is None:
            return
        self._log("epoch", history[-1], int(history[-1]["epoch"]))
        text = io.StringIO()
        names = max(history, key=len).keys()  # an epoch that was not evaluated has fewer
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(history)
        write_text(self.directory / METRICS, text.getvalue())

    def _log(self, kind: str, values: dict[str, float], count: int) -> None:
        if self.board is None:
            return
        named = {f"{kind}/{name}": value for name, value in values.items()}
        for name, value in named.items():
            self.board.add_scalar(name, value, count)
        self.accelerator.log(named, step=self.done)

    def _start_trackers(self, config: RunConfig) -> None:
        """Begins to log to W&B, or goes on with the run that it has."""
        path = self.directory / _TRACKED
        if not path.is_file():
            path.parent.mkdir(exist_ok=True)
            write_text(path, uuid.uuid4().hex)
        arguments: dict[str, Any] = {
            "dir": str(self.directory),
            "name": self.directory.name,
            "id": path.read_text(),
            "resume": "allow",
        }
        values = dataclasses.asdict(config)
        self.accelerator.init_trackers(PROJECT, values, init_kwargs={"wandb": arguments})
