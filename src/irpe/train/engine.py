"""The training loop: one process or many, stopped and continued at any step.

Where a run stands is the epoch, the step in it, and the state of model, optimizer and average.
Every random number follows from the seed and that place, so a continued run is the run itself.
"""

import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import gather_object
from timm.optim._optim_factory import create_optimizer_v2
from timm.scheduler.multistep_lr import MultiStepLRScheduler
from timm.scheduler.scheduler_factory import create_scheduler_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from irpe.files import write_text
from irpe.train.checkpoint import check_room, load_checkpoint, save_checkpoint
from irpe.train.config import RUN_FILE
from irpe.train.logs import Logs, Monitor
from irpe.train.runs import CHECKPOINT, save_model
from irpe.train.sampling import Batches, make_loader, seed_everything, train_sampler
from irpe.train.task import Task

_STOPS = (signal.SIGTERM, signal.SIGINT)


class StoppedError(RuntimeError):
    """A run that was asked to stop, and saved itself."""


def make_accelerator(precision: str = "no") -> Accelerator:
    """Returns Accelerate's view of the processes: one, or those that torchrun started."""
    AcceleratorState._reset_state()  # else a process keeps the precision of its first run
    is_cpu = not torch.accelerator.is_available()
    accelerator = Accelerator(mixed_precision=precision, cpu=is_cpu)
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != started:
        raise RuntimeError(
            f"{started} processes were started, but Accelerate sees {accelerator.num_processes}: "
            "they would train apart in one directory; look at ACCELERATE_* in the environment"
        )
    return accelerator


def fit(task: Task, directory: Path, monitor: Monitor, accelerator: Accelerator) -> nn.Module:
    """Trains from the start, or from the run's checkpoint if there is one, to the end.

    Args:
        task: What is learned.
        directory: The run's directory.
        monitor: Is told how it goes.
        accelerator: The processes.

    Returns:
        The trained model, the averaged one where there is an average.
    """
    trainer = Trainer(task, directory, monitor, accelerator)
    with _stop_signals() as stopped:
        trainer.run(stopped)
    return trainer.kept_model()


class Trainer:
    """A run: where it stands and how it goes on.

    Args:
        task: What is learned.
        directory: The run's directory.
        monitor: Is told how it goes.
        accelerator: The processes.
    """

    def __init__(
        self, task: Task, directory: Path, monitor: Monitor, accelerator: Accelerator
    ) -> None:
        self.task, self.config = task, task.config
        self.directory, self.monitor, self.accelerator = directory, monitor, accelerator
        self.epoch, self.step = 0, 0
        self.history: list[dict[str, float]] = []
        self.broken: set[int] = set()
        self.sum_of_losses = 0.0
        self._plan_batches()
        self._build()
        self._restore()
        self._check_processes()
        if self.accelerator.is_main_process and not (directory / RUN_FILE).exists():
            write_text(directory / RUN_FILE, self.config.to_json())

    def _plan_batches(self) -> None:
        """Splits the batch of a step between the processes, and each share into parts."""
        config, processes = self.config, self.accelerator.num_processes
        share, rest = divmod(config.batch_size, processes)
        self.part = min(config.device_batch_size or share, share)
        if rest or share % self.part:
            raise ValueError(
                f"batch_size = {config.batch_size} cannot be shared by {processes} processes in "
                f"parts of device_batch_size = {self.part}: it must be a multiple of "
                f"{processes * self.part}"
            )
        self.task.check_batch(self.part)
        self.parts = share // self.part
        count = len(self.task.images.source)
        self.steps = len(self._sampler(0)) // share
        if not self.steps:
            raise ValueError(
                f"batch_size = {config.batch_size} is more than the {count} images: choose a "
                "smaller one"
            )

    def _sampler(self, epoch: int) -> Any:
        count, accelerator = len(self.task.images.source), self.accelerator
        return train_sampler(
            count, self.config, accelerator.num_processes, accelerator.process_index, epoch
        )

    def _build(self) -> None:
        config = self.config
        seed_everything(config.seed)
        self.raw = self.task.build().to(self.accelerator.device)
        self._check_directory()
        self.average = ModelEmaV3(self.raw, config.ema_decay) if config.ema_decay else None
        one_pass: dict[str, Any] = {"fused": True} if config.optimizer == "adamw" else {}
        optimizer = create_optimizer_v2(
            self.task.groups(self.raw),
            opt=config.optimizer,
            lr=config.lr,
            weight_decay=config.weight_decay,
            **one_pass,
        )
        self.scheduler = self._make_scheduler(optimizer)
        model: Any = torch.compile(self.raw) if config.compile else self.raw
        self.model: Any = self.accelerator.prepare_model(model)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)

    def _make_scheduler(self, optimizer: Any) -> Any:
        config = self.config
        if config.last_epochs:
            drop = (config.epochs - config.last_epochs) * self.steps
            return MultiStepLRScheduler(
                optimizer,
                decay_t=[drop + 1],  # it counts from 1
                decay_rate=0.1,
                warmup_t=config.warmup_epochs * self.steps,
                warmup_lr_init=config.warmup_lr,
                t_in_epochs=False,
            )
        scheduler, _ = create_scheduler_v2(
            optimizer,
            num_epochs=config.epochs,
            min_lr=config.min_lr,
            warmup_lr=config.warmup_lr,
            warmup_epochs=config.warmup_epochs,
            step_on_epochs=False,
            updates_per_epoch=self.steps,
        )
        return scheduler

    def _check_directory(self) -> None:
        if self.accelerator.is_main_process:
            numbers = sum(p.numel() for p in self.raw.parameters())
            check_room(self.directory, 4 * numbers * (4 if self.config.ema_decay else 3))
            for left in self.directory.glob(f".{CHECKPOINT}.*"):  # by a run that was killed
                left.unlink()
        self.accelerator.wait_for_everyone()

    def _check_processes(self) -> None:
        """Raises an error unless all processes have read the same checkpoint."""
        if self.accelerator.num_processes > 1 and len(set(gather_object([self.done]))) > 1:
            raise ValueError(f"the processes do not share {self.directory}: all nodes must see it")

    def run(self, stopped: threading.Event) -> None:
        """Trains until the end, or until it is asked to stop."""
        self.monitor.start(self.config, self.steps, self.done)
        with Logs(self.directory if self.accelerator.is_main_process else None, self.done) as logs:
            while self.epoch < self.config.epochs:
                self._run_epoch(stopped, logs)
        if self.accelerator.is_main_process and self.history:
            save_model(self.directory, self.kept_model())
        self.accelerator.wait_for_everyone()

    @property
    def done(self) -> int:
        """The steps done so far."""
        return self.epoch * self.steps + self.step

    def _run_epoch(self, stopped: threading.Event, logs: Logs) -> None:
        started, first = time.perf_counter(), self.step
        batches = Batches(self._sampler(self.epoch), self.epoch, self.part, self.step * self.parts)
        contents = iter(make_loader(self.task.images, batches, self.config.workers))
        self.model.train()
        while self.step < self.steps:
            loss = self._run_step(contents)
            self.sum_of_losses += loss
            self.step += 1
            logs.step(self.done, loss, self._lr())
            self.monitor.step(self.done, loss, self.config.batch_size)
            if self._asked_to_stop(stopped):
                self.save()
                raise StoppedError(
                    f"stopped in epoch {self.epoch + 1} after step {self.step} of {self.steps}, "
                    f"saved in {self.directory}"
                )
            if self.step % self.config.save_every == 0 and self.step < self.steps:
                self.save()
        seconds = time.perf_counter() - started
        self.save()  # evaluation may take long
        self._end_epoch(seconds, (self.steps - first) * self.config.batch_size / seconds, logs)

    def _run_step(self, contents: Iterator[Any]) -> float:
        place = self.config.seed, self.epoch, self.step, self.accelerator.process_index
        seed_everything(*place)
        total = 0.0
        parts = [next(contents) for _ in range(self.parts)]
        self.task.begin_step(parts, self.accelerator)
        for part, content in enumerate(parts):
            is_last = part == self.parts - 1
            with nullcontext() if is_last else self.accelerator.no_sync(self.model):
                with self.accelerator.autocast():
                    loss = self.task.loss(self.model, content, self.accelerator.device)
                self._check_loss(loss, content)
                self.accelerator.backward(loss / self.parts)
            total += loss.item() / self.parts
            self._note_broken(self.task.broken(content))
        if self.config.clip_grad:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.config.clip_grad)
        self.scheduler.step_update(self.done)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.raw)
        return total

    def _end_epoch(self, seconds: float, speed: float, logs: Logs) -> None:
        losses = [self.sum_of_losses]
        if self.accelerator.num_processes > 1:
            self._note_broken(gather_object(sorted(self.broken)))
            losses = gather_object(losses)
        epoch = self.epoch + 1
        is_evaluated = epoch % self.config.eval_every == 0 or epoch == self.config.epochs
        row = {
            "epoch": epoch,
            "lr": self._lr(),
            "train_loss": sum(losses) / len(losses) / self.steps,
            **(self.task.evaluate(self.kept_model(), self.accelerator) if is_evaluated else {}),
            "seconds": seconds,
            "images_per_second": speed,
            "broken": len(self.broken),
        }
        self.history.append(row)
        self.epoch, self.step, self.sum_of_losses = epoch, 0, 0.0
        self.save()
        logs.epoch(self.history)
        self.monitor.epoch(row)

    def _lr(self) -> float:
        return max(group["lr"] for group in self.optimizer.param_groups)

    def _check_loss(self, loss: Tensor, content: Any) -> None:
        if not torch.isfinite(loss):
            files = self.task.files(content)
            more = f" and {len(files) - 8} more" if len(files) > 8 else ""
            raise FloatingPointError(
                f"the loss is {loss.item()} in epoch {self.epoch + 1}, step {self.step + 1}, on "
                f"{', '.join(files[:8])}{more}; the last checkpoint is untouched: lower lr, or set "
                "clip_grad"
            )

    def _note_broken(self, indices: list[int]) -> None:
        self.broken.update(indices)
        self.task.check_broken(self.broken)

    def _asked_to_stop(self, stopped: threading.Event) -> bool:
        """Tells whether any process was asked to stop, the same in all of them."""
        if self.accelerator.num_processes == 1:
            return stopped.is_set()
        flag = torch.tensor(int(stopped.is_set()), device=self.accelerator.device)
        return bool(self.accelerator.reduce(flag, "sum"))  # pyright: ignore[reportArgumentType]

    def kept_model(self) -> nn.Module:
        """Returns the model that counts: the average where there is one."""
        return self.raw if self.average is None else self.average.module

    def save(self) -> None:
        """Writes the checkpoint, from the first process."""
        if not all(bool(p.isfinite().all()) for p in self.raw.parameters()):
            raise FloatingPointError(
                f"the weights are no numbers any more in epoch {self.epoch + 1}, step {self.step}; "
                "the last checkpoint is untouched: lower lr, or set clip_grad"
            )
        if self.accelerator.is_main_process:
            state: dict[str, Any] = {
                "model": self.raw.state_dict(),
                "average": None if self.average is None else self.average.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self._scaler_state(),
                "epoch": self.epoch,
                "step": self.step,
                "sum_of_losses": self.sum_of_losses,
                "history": self.history,
                "broken": sorted(self.broken),
            }
            save_checkpoint(self.directory / CHECKPOINT, state)
        self.accelerator.wait_for_everyone()

    def _restore(self) -> None:
        path = self.directory / CHECKPOINT
        if not path.exists():
            return
        state = load_checkpoint(path)
        try:
            self.raw.load_state_dict(state["model"])
            if self.average is not None:
                self.average.module.load_state_dict(state["average"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
            self.epoch, self.step = state["epoch"], state["step"]
            self.sum_of_losses, self.history = state["sum_of_losses"], state["history"]
            self.broken = set(state["broken"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} does not fit the configuration of the run: {error}"
            ) from error

    def _scaler_state(self) -> dict[str, Any] | None:
        return None if self.accelerator.scaler is None else self.accelerator.scaler.state_dict()


@contextmanager
def _stop_signals() -> Generator[threading.Event]:
    """Turns SIGTERM and SIGINT into a request to stop; a second SIGINT ends the program at once."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in _STOPS}

    def ask(number: int, frame: object) -> None:
        stopped.set()
        if number == signal.SIGINT:  # a launcher may send SIGTERM twice, a user means it
            signal.signal(number, before[number])

    for number in _STOPS:
        signal.signal(number, ask)
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
