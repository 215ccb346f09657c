"""Forward passes side by side, all stopped at the same attention.

To solve for the tables of one attention, the queries and keys of every image must be there before
the next attention runs on any of them. Each pass therefore runs in a thread, stops where an
equipped attention calls its encoding, and goes on when it is told to. One thread runs at a time, so
nothing is computed twice, nothing depends on timing, and any host works: no code here knows blocks.
The work is one forward pass per image; the memory is the tokens of one attention of all images.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from irpe.adapters.equipped import equipped_attentions
from irpe.core.positions import Positions
from irpe.errors import UserError


@dataclass(frozen=True, eq=False)
class AttentionInput:
    """What an attention gave its encoding.

    Args:
        name: The attention's path in the model.
        q: The queries that the tables meet: batch, heads, tokens, head dimension.
        k: The keys.
        v: The values.
        rotated: Queries and keys as they enter the product, where the model rotates them.
        grid: The grid of the patches.
        attn_mask: The mask of the call, or `None`.
        scale: The factor of the scores, or a learned one for each head.
        tokens: What entered the attention.
        num_prefix_tokens: How many of them stand before the patches.
    """

    name: str
    q: Tensor
    k: Tensor
    v: Tensor
    rotated: tuple[Tensor, Tensor]
    grid: tuple[int, ...] | Positions
    attn_mask: Tensor | None
    scale: float | Tensor
    tokens: Tensor
    num_prefix_tokens: int


class _Cancelled(BaseException):
    """Ends the thread of a pass that is not wanted any more."""


class Pass:
    """The forward pass of one batch, in a thread of its own.

    Args:
        model: An equipped model, in eval mode.
        images: The batch.
    """

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        self.output: Any = None
        self.tokens: Any = None
        self._model, self._images = model, images
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._reached: AttentionInput | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def advance(self) -> AttentionInput | None:
        """Runs until the next equipped attention calls its encoding; `None` when all is done."""
        self._reached = None
        if not self._thread.is_alive():
            self._thread.start()
        self._go.release()
        self._stopped.acquire()
        if self._error is not None:
            raise self._error
        return self._reached

    def cancel(self) -> None:
        """Ends the pass wherever it is."""
        self._cancelled = True
        self._go.release()
        if self._thread.is_alive():
            self._thread.join()

    def stop_at(self, reached: AttentionInput) -> None:
        """Called in the thread of the pass: waits to be told to go on."""
        self._reached = reached
        self._stopped.release()
        self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._cancelled:
            raise _Cancelled

    def _run(self) -> None:
        _current.running = self
        try:
            self._wait()
            with torch.no_grad():
                self.output = self._model(self._images)
        except _Cancelled:
            pass
        except BaseException as error:  # raised again where the pass is waited for
            self._error = error
        finally:
            self._stopped.release()


_current = threading.local()  # the pass that a thread runs


class Lockstep:
    """Passes of models over batches, advanced together from one attention to the next.

    Args:
        models: Equipped models, in eval mode, whose equipped attentions have the same names.
        batches: The images.
    """

    def __init__(self, models: Sequence[nn.Module], batches: Sequence[Tensor]) -> None:
        self.passes = [[Pass(model, images) for images in batches] for model in models]
        self._handles: list[Any] = []
        for model in models:
            for name, attention in equipped_attentions(model).items():
                self._handles += _stop_in(name, attention)

    def advance(self) -> list[list[AttentionInput]] | None:
        """Runs all passes to the next attention: for each model, what each batch has there."""
        reached = [[each.advance() for each in passes] for passes in self.passes]
        names = {None if each is None else each.name for passes in reached for each in passes}
        if names == {None}:
            return None
        if len(names) > 1:
            raise UserError(
                f"the passes are at different attentions, {sorted(map(str, names))}: the order of "
                "the attentions of this model depends on its input, so it cannot be solved for"
            )
        return [[each for each in passes if each is not None] for passes in reached]

    def outputs(self, model: int) -> list[Any]:
        """Returns what a model returned for each batch, when all is done."""
        return [each.output for each in self.passes[model]]

    def __enter__(self) -> "Lockstep":
        return self

    def __exit__(self, *_: object) -> None:
        for passes in self.passes:
            for each in passes:
                each.cancel()
        for handle in self._handles:
            handle.remove()


def _stop_in(name: str, attention: Any) -> list[Any]:
    """Lets an attention stop where it calls its encoding, in the threads of passes alone."""

    def keep_tokens(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (running := getattr(_current, "running", None)) is not None:
            running.tokens = args[0] if args else next(iter(kwargs.values()))

    def stop(encoding: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (running := getattr(_current, "running", None)) is not None:
            running.stop_at(_read_call(name, running.tokens, encoding, args, kwargs))

    return [
        attention.register_forward_pre_hook(keep_tokens, with_kwargs=True),
        attention.rpe.register_forward_pre_hook(stop, with_kwargs=True),
    ]


def _read_call(name: str, tokens: Tensor, encoding: Any, args: Any, kwargs: Any) -> AttentionInput:
    rotated, v = args[:2], args[2]
    scale = kwargs.get("temperature")
    unrotated = kwargs.get("table_q"), kwargs.get("table_k")
    q, k = rotated if unrotated[0] is None else unrotated
    if scale is None:
        scale = kwargs.get("scale")
    if scale is None:
        scale = q.shape[-1] ** -0.5
    mask = kwargs.get("attn_mask")
    prefix = encoding.num_prefix_tokens
    return AttentionInput(name, q, k, v, rotated, kwargs["grid"], mask, scale, tokens, prefix)
