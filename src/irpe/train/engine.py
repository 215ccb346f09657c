"""The training loop: one process or many, stopped and resumed at any step.

A run stands at an epoch and a step in it, with a state of model, optimizer and average. All
randomness follows from the seed and that position, so a resumed run equals an uninterrupted one.
"""

import dataclasses
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.tracking import TensorBoardTracker
from accelerate.utils import gather_object
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn

from irpe.errors import NotFiniteError, UserError
from irpe.extras import require
from irpe.files import write_text
from irpe.ops.choose import PROVER
from irpe.progress import Event, Listener, silent
from irpe.train.config import RunConfig, make_task
from irpe.train.evaluation import check_broken, measure_effect_of, predict_all, score_of
from irpe.train.optim import build_optimizer, build_schedule
from irpe.train.processes import (
    Batches,
    StoppedError,
    StopRequest,
    make_accelerator,
    make_loader,
    plan_batches,
    seed_everything,
    share_buffers,
    start_loading,
    stop_requests,
    train_sampler,
)
from irpe.train.run import Run
from irpe.train.task import AS_TRAINED, Images, Score, Task

PROJECT = "irpe"  # the project of runs in a service that they are logged to
_TRACKED = Path("wandb") / "id"  # the name that such a service has for a run


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
        >>> fitted.score.value  # doctest: +SKIP
    """

    model: nn.Module
    history: list[dict[str, float]]
    score: Score | None

    @property
    def effect(self) -> float | None:
        """The last effect: how much attention changes without the encoding; `None` without one."""
        return self.history[-1].get("effect")


def train(
    config: RunConfig,
    directory: str | Path,
    listen: Listener = silent,
    accelerator: Accelerator | None = None,
    begin: "Callable[[Trainer], object] | None" = None,
) -> FitResult:
    """Trains a model to the end and returns it; a run that stopped goes on where it was.

    Args:
        config: What is trained: a recipe of `irpe.recipes.RECIPES`, or one changed by `replace`.
        directory: The run's directory; what it holds is described in the guide to training.
        listen: Hears how it goes: "training" with each step, "epoch 3/5" with its result.
        accelerator: The processes; `None`: as they were started, on the device that is there.
        begin: Called once when the run has its directory to itself, before the first step.

    Examples:
        >>> import irpe.recipes, irpe.train, tempfile
        >>> config = irpe.recipes.RECIPES["laptop"]().replace(epochs=1, warmup_epochs=0)
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
        ...     fitted = irpe.train.train(config, folder)
    """
    run = Run(directory)
    accelerator = accelerator or make_accelerator(config.precision)
    weights = run.checkpoint()["model"] if run.has_checkpoint else None
    trainer = Trainer(make_task(config, weights), run, accelerator, listen)
    return trainer.fit(begin)


class Trainer:
    """A run on its way: where it stands, and how it goes on.

    Args:
        task: What is learned.
        run: The run.
        accelerator: The processes; the first of a node opens the data before the others.
        listen: Hears how it goes.
        part: Takes the images to train on, and returns those that are: a fraction in a search.
    """

    def __init__(
        self,
        task: Task,
        run: Run,
        accelerator: Accelerator,
        listen: Listener = silent,
        part: Callable[[Images], Images] = lambda images: images,
    ) -> None:
        self.task, self.run, self.accelerator, self.listen = task, run, accelerator, listen
        self.epoch, self.step = 0, 0
        self.history: list[dict[str, float]] = []
        self.score: Score | None = None
        self.broken, self.sum_of_losses = set[int](), 0.0
        with accelerator.local_main_process_first():  # it may download or compute features
            self.images = part(task.open("train", None, listen))
            self.val_images = task.open("val", AS_TRAINED, listen)
        self.config: Any = task.config
        self.plan = plan_batches(self.config, len(self.images), accelerator.num_processes)
        self._build()

    def fit(self, begin: "Callable[[Trainer], object] | None" = None) -> FitResult:
        """Trains to the end, or until the process is asked to stop; then the run saves itself."""
        main = self.accelerator.is_main_process
        with self.run.locked() if main else nullcontext(), stop_requests() as stopped:
            if main:
                self.run.begin(self.config)
            self.accelerator.wait_for_everyone()
            self._restore()
            done = [self.done]
            if self.accelerator.num_processes > 1 and len(set(gather_object(done))) > 1:
                raise UserError(f"the processes do not share {self.run}: all nodes must see it")
            if begin is not None and main:
                begin(self)
            self._run_epochs(stopped)
        return FitResult(self.final_model(), self.history, self.score)

    def _sampler(self, epoch: int) -> Any:
        accelerator = self.accelerator
        ranks = accelerator.num_processes, accelerator.process_index
        return train_sampler(len(self.images), self.config, *ranks, epoch)

    def _build(self) -> None:
        config = self.config
        seed_everything(config.seed)
        self.raw = self.task.build().to(self.accelerator.device)
        self.average = ModelEmaV3(self.raw, config.ema_decay) if config.ema_decay else None
        optimizer = build_optimizer(self.task.groups(self.raw), config)
        self.schedule = build_schedule(optimizer, config, self.plan.steps)
        module: Any = _Step(self.raw)
        module = torch.compile(module) if config.compile else module
        self.module: Any = self.accelerator.prepare_model(module)
        self.optimizer = self.accelerator.prepare_optimizer(optimizer)

    def _run_epochs(self, stopped: StopRequest) -> None:
        self.listen(Event("training", self.done, self.plan.steps * self.config.epochs))
        with self._trackers():
            while self.epoch < self.config.epochs:
                self._run_epoch(stopped)
        if self.accelerator.is_main_process and self.history:
            self.run.save_model(self.final_model())
        self.accelerator.wait_for_everyone()

    @property
    def done(self) -> int:
        """The steps done so far."""
        return self.epoch * self.plan.steps + self.step

    @property
    def lr(self) -> float:
        """The learning rate of the model, but for what has a rate of its own."""
        return self.optimizer.param_groups[0]["lr"]

    @contextmanager
    def _trackers(self) -> Generator[None]:
        """Logs curves to TensorBoard, and to the services that the accelerator has."""
        require("tensorboard", "train")
        # What an interrupted run logged after its checkpoint is discarded.
        board = TensorBoardTracker("tensorboard", self.run.directory, purge_step=self.done + 1)
        self.board = board
        board.start()
        if self.accelerator.is_main_process and self.accelerator.log_with:
            path = self.run.directory / _TRACKED
            if not path.is_file():
                path.parent.mkdir(exist_ok=True)
                write_text(path, uuid.uuid4().hex)
            self.accelerator.init_trackers(
                PROJECT,
                dataclasses.asdict(self.config),
                {
                    "wandb": {
                        "dir": str(self.run),
                        "name": self.run.directory.name,
                        "id": path.read_text(),
                        "resume": "allow",
                    }
                },
            )
        try:
            yield
        finally:
            for tracker in (board, *self.accelerator.trackers):
                tracker.finish()

    def _log(self, kind: str, values: dict[str, float], count: int) -> None:
        named = {f"{kind}/{name}": value for name, value in values.items()}
        self.board.log(named, step=count)
        self.accelerator.log(named, step=self.done)

    def _run_epoch(self, stopped: StopRequest) -> None:
        started, first = time.perf_counter(), self.step
        first_batch, steps = self.step * self.plan.num_micro_batches, self.plan.steps
        batches = Batches(self._sampler(self.epoch), self.epoch, self.plan.micro_batch, first_batch)
        loaded = start_loading(make_loader(self.images, batches, self.config.workers))
        self.module.train()
        while self.step < steps:
            loss = self._run_step(loaded)
            self.sum_of_losses += loss
            self.step += 1
            self._log("step", {"loss": loss, "lr": self.lr}, self.done)
            values = {"loss": loss, "lr": self.lr, "images": self.config.batch_size}
            self.listen(Event("training", self.done, steps * self.config.epochs, values))
            if stopped.is_set():
                self.accelerator.set_trigger()
            if self.accelerator.check_trigger():  # in any process
                self.save()
                raise StoppedError(
                    f"stopped in epoch {self.epoch + 1} after step {self.step} of {steps}, "
                    f"saved in {self.run}",
                    stopped.number,
                )
            if self.step % self.config.save_every == 0 and self.step < steps:
                self.save()
        seconds = time.perf_counter() - started
        self.save()  # evaluation may take long
        self._end_epoch(seconds, (steps - first) * self.config.batch_size / seconds)

    def _run_step(self, loaded: Iterator[Any]) -> float:
        seed_everything(self.config.seed, self.epoch, self.step, self.accelerator.process_index)
        total = 0.0
        batches = [next(loaded) for _ in range(self.plan.num_micro_batches)]
        losses = self.task.losses(self.raw, batches, self.accelerator)
        for batch in batches:
            is_last = batch is batches[-1]
            with nullcontext() if is_last else self.accelerator.no_sync(self.module):
                with self.accelerator.autocast():
                    loss = self.module(losses)
                self._check_loss(loss, batch)
                self.accelerator.backward(loss / len(batches))
            total += loss.item() / len(batches)
            self._add_broken(batch.broken)
        if self.config.clip_grad:
            self.accelerator.clip_grad_norm_(self.module.parameters(), self.config.clip_grad)
        self.schedule.step_update(self.done)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.average is not None:
            self.average.update(self.raw)
        return total

    def _end_epoch(self, seconds: float, speed: float) -> None:
        losses = [self.sum_of_losses]
        if self.accelerator.num_processes > 1:
            self._add_broken(gather_object(sorted(self.broken)))
            losses = gather_object(losses)
        epoch = self.epoch + 1
        evaluated: dict[str, float] = {}
        if epoch % self.config.eval_every == 0 or epoch == self.config.epochs:
            share_buffers(self.final_model(), self.accelerator)
            found = predict_all(self.task, self.final_model(), self.val_images, self.accelerator)
            self.score = score_of(self.task, self.val_images, *found)
            evaluated = self.score.row()
            effect = measure_effect_of(self.task, self.final_model(), self.accelerator)
            evaluated |= {} if effect is None else {"effect": effect}
        row = {
            "epoch": epoch,
            "lr": self.lr,
            "train_loss": sum(losses) / len(losses) / self.plan.steps,
            **evaluated,
            "seconds": seconds,
            "images_per_second": speed,
            "broken": len(self.broken),
        }
        self.history.append(row)
        self.epoch, self.step, self.sum_of_losses = epoch, 0, 0.0
        self.save()
        self._log("epoch", row, epoch)
        if self.accelerator.is_main_process:
            self.run.save_metrics(self.history)
        score = self.score if evaluated else None
        self.listen(Event(f"epoch {epoch:>3}/{self.config.epochs}", result=_line(row, score)))

    def _check_loss(self, loss: Tensor, batch: Any) -> None:
        if not torch.isfinite(loss):
            files = [self.images.source.filename(index) for index in batch.indices]
            more = f" and {len(files) - 8} more" if len(files) > 8 else ""
            raise NotFiniteError(
                f"the loss is {loss.item()} in epoch {self.epoch + 1}, step {self.step + 1}, on "
                f"{', '.join(files[:8])}{more}; the last checkpoint is untouched: lower lr, or set "
                "clip_grad"
            )

    def _add_broken(self, indices: list[int]) -> None:
        self.broken.update(indices)
        check_broken(sorted(self.broken), len(self.images), self.images, self.config)

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
            self.run.save_checkpoint(state)
        self.accelerator.wait_for_everyone()

    def _restore(self) -> None:
        if not self.run.has_checkpoint:
            return
        state = self.run.checkpoint()
        self.epoch, self.step = state["epoch"], state["step"]
        self.sum_of_losses, self.history = state["sum_of_losses"], state["history"]
        self.broken = set(state["broken"])
        PROVER.recall(state.get("implementations", {}))  # at first they were not stored
        try:
            if self.step > self.plan.steps:
                raise UserError(
                    f"it stands at step {self.step}, but {len(self.images)} images make "
                    f"{self.plan.steps} steps: restore the data"
                )
            if self.average is not None:
                self.average.module.load_state_dict(state["average"])
            self.raw.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.accelerator.scaler is not None:
                self.accelerator.scaler.load_state_dict(state["scaler"])
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(
                f"the checkpoint of {self.run} does not fit its configuration: {error}"
            ) from error


class _Step(nn.Module):
    """What several processes share: computes the next loss of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, losses: Iterator[Tensor]) -> Tensor:
        """Returns the next loss of `Task.losses`, which calls the model."""
        return next(losses)


def _line(row: dict[str, float], score: Score | None) -> str:
    """Returns what an epoch found, in words."""
    parts = [f"train {row['train_loss']:.3f}"]
    parts += [] if score is None else [score.line(brief=True)]
    parts += [f"effect {row['effect']:.1%}"] if "effect" in row else []
    parts += [f"{row['images_per_second']:.0f} images/s"]
    parts += [f"{row['broken']} unreadable"] if row["broken"] else []
    return "  ".join(parts)
