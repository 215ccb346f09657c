"""`irpe.prepare`: proofs and timings of all calls of a model, before they are needed."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from irpe.ops.proof.decide import Prover, Request


class Preparation(NamedTuple):
    """What the calls of a model take from now on. Print it.

    Args:
        choices: For each signature and size class, the implementation.
        known: For each of them, what is known about each candidate.
    """

    choices: dict[str, str]
    known: dict[str, dict[str, str]]

    def __str__(self) -> str:
        if not self.choices:
            return "nothing to prove: no call of this model has a candidate on its device"
        lines: list[str] = []
        for call, name in self.choices.items():
            lines += [f"{name}: {call}"]
            lines += [f"  {candidate}: {text}" for candidate, text in self.known[call].items()]
        return "\n".join(lines)


def prepare_model(
    prover: Prover, model: nn.Module, images: object, training: bool = True
) -> Preparation:
    """Proves and times what a model calls: see `irpe.prepare`."""
    requests: dict[tuple[object, ...], Request] = {}
    modes = [True, False] if training else [False]
    with _as_it_was(model), prover.collect() as collected:
        for mode in modes:
            model.train(mode)
            with torch.set_grad_enabled(mode):
                _call(model, images)
    for request in collected:
        requests.setdefault(request[:3], request)
    found = list(requests.values())
    prover.prove(found)
    choices, known = {}, {}
    for request in found:
        signature, size_class, able = request[:3]
        key = f"{signature}; {size_class}"
        choices[key] = prover.best_known(signature, size_class, able)
        known[key] = {name: prover.describe(name, signature, size_class) for name in able}
    return Preparation(choices, known)


def _call(model: nn.Module, images: Any) -> object:
    if isinstance(images, Mapping):
        return model(**images)
    return model(*images) if isinstance(images, tuple) else model(images)


@contextmanager
def _as_it_was(model: nn.Module) -> Generator[None]:
    """Restores buffers, training modes and random states at the end."""
    modes = {module: module.training for module in model.modules()}
    buffers: Sequence[tuple[Tensor, Tensor]] = [(b, b.detach().clone()) for b in model.buffers()]
    with torch.random.fork_rng({p.device.index for p in model.parameters() if p.is_cuda}):
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)
