"""The training loop: one process or many, stopped and resumed at any step.

A run stands at an epoch and a step in it, with a state of model, optimizer and average. All
randomness follows from the seed and that position, so a resumed run equals an uninterrupted one.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from irpe.adapters.saving import check_tensors
from irpe.errors import NotFiniteError, UserError
from irpe.ops.choose import PROVER
from irpe.progress import NO_PROGRESS, Progress
from irpe.train.checkpoint import check_disk_space, load_checkpoint, save_checkpoint
from irpe.train.locks import lock_run
from irpe.train.logs import Logs
from irpe.train.optim import build_optimizer, build_schedule
from irpe.train.overview import effect_on_images
from irpe.train.processes import in_any_process, share_buffers
from irpe.train.restoring import check_groups, check_moments, check_position
from irpe.train.runs import CHECKPOINT, remove_remains, save_model, write_config
from irpe.train.sampling import Batches, make_loader, train_sampler
from irpe.train.seeding import seed_everything
from irpe.train.signals import StoppedError, StopRequest, stop_requests
from irpe.train.steps import note_few_steps, suggest_batch_size
from irpe.train.task import Task, TaskScore


@dataclass(frozen=True)
class FitResult:
    """What a training run found.

    Args:
        model: The trained model; the averaged one where there is an average.
        history: The rows of the run's table, one per epoch.
        score: The last evaluation; `None` if the run had ended before.

    Examples:
        >>> import irpe.recipes, irpe.train
        >>> config = irpe.recipes.RECIPES["laptop"]()
        >>> fitted = irpe.train.train(config, "runs/laptop")  # doctest: +SKIP
        >>> fitted.score.row()["top1"]  # doctest: +SKIP
    """

    model: nn.Module
    history: list[dict[str, float]]
    score: TaskScore | None

    @property
    def effect(self) -> float | None:
        """The last effect: how much attention changes without the encoding; `None` without one."""
        return self.history[-1].get("effect")


def fit(
    task: Task, directory: Path, accelerator: Accelerator, progress: Progress = NO_PROGRESS
) -> FitResult:
    """Trains to the end, from the run's checkpoint if there is one.

    Args:
        task: What is learned.
        directory: The run's directory.
        accelerator: The processes.
        progress: Is told how it goes.
    """
    return run_to_end(Trainer(task, directory, accelerator, progress))


def run_to_end(trainer: "Trainer", begin: Callable[[], object] | None = None) -> FitResult:
    """Trains to the end, or until the process is asked to stop; then the run saves itself.

    Args:
        trainer: The run.
        begin: Called when the run has its directory to itself, before the first step.
    """
    with trainer, stop_requests() as stopped:
        if begin is not None:
            begin()
        trainer.run(stopped)
    return FitResult(trainer.final_model(), trainer.history, trainer.score)


class Trainer:
    """A run: where it stands and how it goes on. In a `with` block it has its directory to itself.

    Args:
        task: What is learned.
        directory: The run's directory.
        accelerator: The processes.
        progress: Is told how it goes.
    """

    def __init__(
        self, task: Task, directory: Path, accelerator: Accelerator, progress: Progress
    ) -> None:
        self.task, self.config = task, task.config
        self.directory, self.accelerator, self.progress = directory, accelerator, progress
        self.epoch, self.step = 0, 0
        self.history: list[dict[str, float]] = []
        self.score: TaskScore | None = None
        self.broken, self.sum_of_losses = set[int](), 0.0
        self._held = ExitStack()
        self._plan_batches()
        self._build()

    def __enter__(self) -> Self:
        with ExitStack() as held:
            if self.accelerator.is_main_process:
                self._check_disk()
                held.enter_context(lock_run(self.directory))
                remove_remains(self.directory)
            self.accelerator.wait_for_everyone()
            self._restore()
            self._check_processes()
            if self.accelerator.is_main_process:
                write_config(self.directory, self.config)
            self._held = held.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def _plan_batches(self) -> None:
        """Splits the batch of a step between the processes, and each process's into micro-batches.

        Sets the size of a micro-batch, their number in a step, the steps of an epoch, and a note if
        these are few.
        """
        config, processes = self.config, self.accelerator.num_processes
        per_process, rest = divmod(config.batch_size, processes)
        self.micro_batch = min(config.device_batch_size or per_process, per_process)
        if rest or per_process % self.micro_batch:
            raise UserError(
                f"batch_size = {config.batch_size} cannot be split between {processes} processes "
                f"in micro-batches of device_batch_size = {self.micro_batch}: it must be a "
                f"multiple of {processes * self.micro_batch}"
            )
        self.task.check_micro_batch(self.micro_batch)
        self.num_micro_batches = per_process // self.micro_batch
        self.steps = len(self._sampler(0)) // per_process
        count = len(self.task.images.source)
        if not self.steps:
            raise UserError(
                f"batch_size = {config.batch_size} is more than the {count} images: choose a "
                f"smaller one, such as {suggest_batch_size(count, processes)}"
            )
        of_batch = config.batch_size, processes, config.aug_repeats
        self.note = note_few_steps(self.steps, count, *of_batch)

    def _sampler(self, epoch: int) -> Any:
        count, accelerator = len(self.task.images.source), self.accelerator
        return train_sampler(
            count, self.config, accelerator.num_processes, accelerator.process_index, epoch
        )

    def _build(self) -> None:
        config = self.config
        seed_everything(config.seed)
        self.raw = self.task.build().to(self.accelerator.device)
        self.average = ModelEmaV3(self.raw, config.ema_decay) if config.ema_decay else None
        optimizer = build_optimizer(self.task.optimizer_groups(self.raw), config)
        self.schedule = build_schedule(optimizer, config, self.steps)
        module: Any = self.task.training_module(self.raw)
        module = torch.compile(module) if config.compile else module
        self.module: Any = self.accelerator.prepare_model(module)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)

    def _check_disk(self) -> None:
        count = sum(p.numel() for p in self.raw.parameters())
        check_disk_space(self.directory, 4 * count * (4 if self.config.ema_decay else 3))

    def _check_processes(self) -> None:
        """Raises an error unless all processes have read the same checkpoint."""
        if self.accelerator.num_processes > 1 and len(set(gather_object([self.done]))) > 1:
            raise UserError(f"the processes do not share {self.directory}: all nodes must see it")

    def run(self, stopped: StopRequest) -> None:
        """Trains until the end, or until it is asked to stop."""
        self.progress.start("training", self.steps * self.config.epochs, self.done)
        with Logs(self.directory, self.config, self.done, self.accelerator) as logs:
            while self.epoch < self.config.epochs:
                self._run_epoch(stopped, logs)
        if self.accelerator.is_main_process and self.history:
            save_model(self.directory, self.final_model())
        self.accelerator.wait_for_everyone()

    @property
    def done(self) -> int:
        """The steps done so far."""
        return self.epoch * self.steps + self.step

    @property
    def lr(self) -> float:
        """The learning rate of the model, but for what has a rate of its own."""
        return self.optimizer.param_groups[0]["lr"]

    def _run_epoch(self, stopped: StopRequest, logs: Logs) -> None:
        started, first = time.perf_counter(), self.step
        first_batch = self.step * self.num_micro_batches
        batches = Batches(self._sampler(self.epoch), self.epoch, self.micro_batch, first_batch)
        loaded = iter(make_loader(self.task.images, batches, self.config.workers))
        self.module.train()
        while self.step < self.steps:
            loss = self._run_step(loaded)
            self.sum_of_losses += loss
            self.step += 1
            logs.step(self.done, loss, self.lr)
            values = {"loss": loss, "lr": self.lr, "images": self.config.batch_size}
            self.progress.step(self.done, values)
            if in_any_process(stopped.is_set(), self.accelerator):
                self.save()
                raise StoppedError(
                    f"stopped in epoch {self.epoch + 1} after step {self.step} of {self.steps}, "
                    f"saved in {self.directory}",
                    stopped.number,
                )
            if self.step % self.config.save_every == 0 and self.step < self.steps:
                self.save()
        seconds = time.perf_counter() - started
        self.save()  # evaluation may take long
        self._end_epoch(seconds, (self.steps - first) * self.config.batch_size / seconds, logs)

    def _run_step(self, loaded: Iterator[Any]) -> float:
        seed_everything(self.config.seed, self.epoch, self.step, self.accelerator.process_index)
        total = 0.0
        batches = [next(loaded) for _ in range(self.num_micro_batches)]
        normalizer = self.task.normalizer(batches, self.accelerator)
        device = self.accelerator.device
        for batch in batches:
            is_last = batch is batches[-1]
            with nullcontext() if is_last else self.accelerator.no_sync(self.module):
                with self.accelerator.autocast():
                    loss = self.task.loss(self.module, batch, normalizer, device)
                self._check_loss(loss, batch)
                self.accelerator.backward(loss / len(batches))
            total += loss.item() / len(batches)
            self._add_broken(self.task.broken(batch))
        if self.config.clip_grad:
            self.accelerator.clip_grad_norm_(self.module.parameters(), self.config.clip_grad)
        self.schedule.step_update(self.done)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.raw)
        return total

    def _end_epoch(self, seconds: float, speed: float, logs: Logs) -> None:
        losses = [self.sum_of_losses]
        if self.accelerator.num_processes > 1:
            self._add_broken(gather_object(sorted(self.broken)))
            losses = gather_object(losses)
        epoch = self.epoch + 1
        evaluated: dict[str, float] = {}
        if epoch % self.config.eval_every == 0 or epoch == self.config.epochs:
            share_buffers(self.final_model(), self.accelerator)
            self.score = self.task.evaluate(self.final_model(), self.accelerator)
            evaluated = self.score.row()
            effect = effect_on_images(self.task, self.final_model(), self.accelerator)
            evaluated |= {} if effect is None else {"effect": effect}
        row = {
            "epoch": epoch,
            "lr": self.lr,
            "train_loss": sum(losses) / len(losses) / self.steps,
            **evaluated,
            "seconds": seconds,
            "images_per_second": speed,
            "broken": len(self.broken),
        }
        self.history.append(row)
        self.epoch, self.step, self.sum_of_losses = epoch, 0, 0.0
        self.save()
        logs.epoch(self.history)
        self.progress.report(f"epoch {epoch:>3}/{self.config.epochs}", row)

    def _check_loss(self, loss: Tensor, batch: Any) -> None:
        if not torch.isfinite(loss):
            files = self.task.files(batch)
            more = f" and {len(files) - 8} more" if len(files) > 8 else ""
            raise NotFiniteError(
                f"the loss is {loss.item()} in epoch {self.epoch + 1}, step {self.step + 1}, on "
                f"{', '.join(files[:8])}{more}; the last checkpoint is untouched: lower lr, or set "
                "clip_grad"
            )

    def _add_broken(self, indices: list[int]) -> None:
        self.broken.update(indices)
        self.task.check_broken(self.broken)

    def final_model(self) -> nn.Module:
        """Returns the model that is evaluated and saved: the average where there is one."""
        return self.raw if self.average is None else self.average.module

    def save(self) -> None:
        """Writes the checkpoint, from the first process."""
        if not all(bool(p.isfinite().all()) for p in self.raw.parameters()):
            raise NotFiniteError(
                f"the weights are not finite any more in epoch {self.epoch + 1}, step {self.step}; "
                "the last checkpoint is untouched: lower lr, or set clip_grad"
            )
        if self.accelerator.is_main_process:
            scaler = self.accelerator.scaler
            state: dict[str, Any] = {
                "model": self.raw.state_dict(),
                "average": None if self.average is None else self.average.module.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": None if scaler is None else scaler.state_dict(),
                "epoch": self.epoch,
                "step": self.step,
                "sum_of_losses": self.sum_of_losses,
                "history": self.history,
                "broken": sorted(self.broken),
                "implementations": PROVER.choices,  # of attention on a GPU, found by timing
            }
            save_checkpoint(self.directory / CHECKPOINT, state)
        self.accelerator.wait_for_everyone()

    def _restore(self) -> None:
        path = self.directory / CHECKPOINT
        if not path.exists():
            return
        state = load_checkpoint(path)
        self.epoch, self.step = state["epoch"], state["step"]
        self.sum_of_losses, self.history = state["sum_of_losses"], state["history"]
        self.broken = set(state["broken"])
        PROVER.recall(state["implementations"])
        try:
            check_position(state, self.config.epochs, self.steps, len(self.task.images.source))
            check_tensors(self.raw, state["model"], path)
            if self.average is not None:
                check_tensors(self.average.module, state["average"] or {}, path)
                self.average.module.load_state_dict(state["average"])
            self.raw.load_state_dict(state["model"])
            check_groups(self.optimizer, state["optimizer"]["param_groups"])
            self.optimizer.load_state_dict(state["optimizer"])
            check_moments(self.optimizer, self.done)
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"{path} does not fit the run's configuration: {error}") from error
