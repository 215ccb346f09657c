"""`recalibrate`: distils the original's features into a model that was made relative."""

import math
from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from irpe.adapters.equipped import equipped_attentions, table_names
from irpe.errors import UserError
from irpe.files import read_torch, write_whole
from irpe.nn.modes import eval_mode
from irpe.progress import Event, Listener, silent
from irpe.relative.conversion import Agreement
from irpe.relative.images import batches_of
from irpe.relative.outputs import tokens_of

TRAINED = ("tables", "norms", "all")
_TABLE_STEP = 0.01  # of the root mean square of a table's elements: the most that a step moves one
_SAVE_EVERY = 10  # steps
_NORMS = (nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Recalibration:
    """How well features agree with the original's on held-out images.

    Args:
        steps: The steps of distillation.
        trained: What was trained.
        before: The agreement of all tokens before them.
        after: And after.
    """

    steps: int
    trained: str
    before: Agreement
    after: Agreement

    def __str__(self) -> str:
        return (
            f"{self.steps} steps of distillation on {self.trained}: held-out tokens have cosine "
            f"{self.after.cosine:.3f} to the original's ({self.before.cosine:.3f} before), R2 "
            f"{self.after.r2:.2f} ({self.before.r2:.2f})"
        )


def recalibrate(
    model: nn.Module,
    original: nn.Module,
    images: Tensor | Iterable[Tensor],
    *,
    steps: int = 100,
    trained: str = "all",
    lr: float = 5e-5,
    batch_size: int = 12,
    holdout: float = 0.25,
    seed: int = 0,
    checkpoint: Path | None = None,
    listen: Listener = silent,
) -> Recalibration:
    """Distils the tokens of the original into a model that was made relative, in place.

    The loss is the squared error of the tokens, relative to the variance of each feature; tokens
    before the patches and patches count alike. No labels are used. Solved tables are 7 to 70 in
    size: a step moves an element by up to 1 % of the root mean square of its table, other weights
    move at `lr`. Both rates fall to zero along a cosine. Interrupted, the model is as it was.

    Args:
        model: A model that `make_relative` returned.
        original: The model that it was made of: a copy from before.
        images: Unlabelled images, as many as possible.
        steps: The number of steps.
        trained: "tables" alone, tables and "norms", or "all" parameters.
        lr: The rate of what is not a table.
        batch_size: The images of a step.
        holdout: The fraction of images that is measured on and not trained on.
        seed: Chooses these and the order of the others.
        checkpoint: A file to continue from if it is there, and to write to every few steps. It is
            removed at the end.
        listen: Is called with how the work goes.

    Examples:
        >>> import copy, irpe, timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)  # pretrained=True
        >>> original, images = copy.deepcopy(model), torch.randn(4, 3, 224, 224)
        >>> conversion = irpe.make_relative(model, images, "product-bias-k")
        >>> irpe.recalibrate(model, original, images, steps=1).steps
        1
    """
    if trained not in TRAINED:
        raise UserError(f"trained {trained!r} is not one of {', '.join(TRAINED)}")
    if steps < 1 or not (lr > 0 and math.isfinite(lr)):
        raise UserError(f"steps = {steps}, lr = {lr}: both must be above 0")
    equipped_attentions(model)
    training, held_out, _ = batches_of(images, None, holdout, seed, batch_size)
    parameters = _parameters(model, trained, lr)
    with eval_mode(model), eval_mode(original), _only_trained(model, parameters):
        before = _agreement(model, original, held_out)
        with ExitStack() as undo:
            undo.callback(_restore, [(each, each.detach().clone()) for each in model.parameters()])
            work = {"steps": steps, "trained": trained, "lr": lr, "seed": seed}
            work["batches"] = len(training)
            _distil(model, original, parameters, training, work, checkpoint, listen)
            after = _agreement(model, original, held_out)
            undo.pop_all()
    return Recalibration(steps, trained, before, after)


def _distil(
    model: nn.Module,
    original: nn.Module,
    groups: list[dict[str, Any]],
    batches: list[Tensor],
    work: dict[str, Any],
    checkpoint: Path | None,
    listen: Listener,
) -> None:
    steps, seed = work["steps"], work["seed"]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0)
    rates = [group["lr"] for group in optimizer.param_groups]
    first = _load(checkpoint, model, optimizer, work)
    listen(Event("recalibrating", first, steps))
    for step in range(first, steps):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * (1 + math.cos(math.pi * step / steps)) / 2
        images = batches[_batch_of(step, len(batches), seed)]
        with torch.no_grad():
            expected = tokens_of(original, images)
        loss = _loss(tokens_of(model, images), expected)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_([p for group in groups for p in group["params"]], 1.0)
        optimizer.step()
        listen(Event("recalibrating", step + 1, steps, {"loss": loss.item()}))
        if checkpoint is not None and (step + 1) % _SAVE_EVERY == 0:
            _save(checkpoint, model, optimizer, step + 1, work)
    if checkpoint is not None:
        checkpoint.unlink(missing_ok=True)


def _loss(found: Tensor, expected: Tensor) -> Tensor:
    """Returns the squared error relative to the variance of each feature."""
    found, expected = found.flatten(0, -2).float(), expected.flatten(0, -2).float()
    error = (found - expected).square().mean(0)
    return (error / expected.var(0).clamp(min=1e-6)).mean()


def _batch_of(step: int, count: int, seed: int) -> int:
    """Returns which batch a step takes: each once in an epoch, in an order of its own."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step // count)
    return int(torch.randperm(count, generator=generator)[step % count])


def _parameters(model: nn.Module, trained: str, lr: float) -> list[dict[str, Any]]:
    """Returns what is trained, in groups: each table with a rate that fits its size."""
    tables = [model.get_parameter(name) for name in table_names(model)]
    groups: list[dict[str, Any]] = []
    for table in tables:
        size = float(table.detach().double().square().mean().sqrt())
        groups.append({"params": [table], "lr": max(_TABLE_STEP * size, lr)})
    of_tables = {id(table) for table in tables}
    others: list[nn.Parameter] = []
    if trained == "all":
        others = [each for each in model.parameters() if id(each) not in of_tables]
    elif trained == "norms":
        norms = [each for each in model.modules() if isinstance(each, _NORMS)]
        others = [parameter for norm in norms for parameter in norm.parameters()]
    return [*groups, {"params": others, "lr": lr}] if others else groups


@contextmanager
def _only_trained(model: nn.Module, groups: list[dict[str, Any]]) -> Generator[None]:
    """Lets gradients reach what is trained alone; afterwards all is as before."""
    before = [
        (parameter, parameter.requires_grad, parameter.grad) for parameter in model.parameters()
    ]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    try:
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in trained)
        yield
    finally:
        for parameter, required, gradient in before:
            parameter.requires_grad_(required)
            parameter.grad = gradient


def _restore(values: list[tuple[nn.Parameter, Tensor]]) -> None:
    with torch.no_grad():
        for parameter, value in values:
            parameter.copy_(value)


def _agreement(model: nn.Module, original: nn.Module, batches: list[Tensor]) -> Agreement:
    with torch.no_grad():
        pairs = [(tokens_of(original, each), tokens_of(model, each)) for each in batches]
    return Agreement.of(*zip(*pairs, strict=True))


def _save(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    done: int,
    work: dict[str, Any],
) -> None:
    state = {
        "done": done,
        "work": work,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda file: torch.save(state, file))


def _load(
    path: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer, work: dict[str, Any]
) -> int:
    """Continues from a checkpoint if there is one, and returns the steps that it has done."""
    if path is None or not path.exists():
        return 0
    state: Any = read_torch(path)
    found = state.get("work") if isinstance(state, dict) else None
    if found != work:
        raise UserError(
            f"{path} is not a checkpoint of this recalibration, {work}, but of {found}: repeat "
            "that one, or remove the file"
        )
    try:
        optimizer.load_state_dict(state["optimizer"])
        model.load_state_dict(state["model"])
    except (RuntimeError, ValueError, KeyError) as error:
        raise UserError(f"{path} is a checkpoint of another model or of other weights") from error
    return int(state["done"])
