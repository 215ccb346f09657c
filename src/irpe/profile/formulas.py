"""How many multiply-accumulates an encoding adds, in closed form: what the counter must find.

With n tokens, h heads of dimension d, and k rows of a table that are used on the grid:

- a table of vectors costs h n d min(k, n): Eq. 27 over the used rows, or over all pairs if they are
  fewer (Eq. 26); a bias costs nothing, it is looked up and added
- an encoding that differs says so itself (`extra_macs` in `irpe.core.encodings`)
- tables that are folded into the heads of an unmodified attention (`irpe.ops.impl.folded`) widen
  them: h n^2 for each further dimension, for queries with keys and for weights with values
- CPVT costs nine products for each number of a patch token
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from irpe.core.grid import Grid
from irpe.nn.encoding import RelativePositionEncoding
from irpe.nn.generator import PositionGenerator


@dataclass(frozen=True)
class Call:
    """One use of an encoding in a forward pass.

    Args:
        module: The encoding, or the generator of positions.
        shape: The shape of the queries, or of the tokens.
        grid: The grid.
    """

    module: RelativePositionEncoding | PositionGenerator
    shape: torch.Size
    grid: tuple[int, ...]


@contextmanager
def recorded_calls(model: nn.Module) -> Generator[list[Call]]:
    """Notes how a model uses its encodings, as long as the context lasts."""
    calls: list[Call] = []

    def note(module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        grid = named["grid"] if "grid" in named else inputs[1]
        calls.append(Call(module, inputs[0].shape, tuple(grid)))

    kinds = RelativePositionEncoding, PositionGenerator
    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, kinds)
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def extra_macs(call: Call) -> int:
    """Returns what an encoding adds to plain attention, or to a model, in one use."""
    if isinstance(call.module, PositionGenerator):
        batch, _, dim = call.shape
        return batch * math.prod(call.grid) * dim * call.module.weight[0].numel()
    tokens = call.shape[2]
    rows = [min(m.num_used_buckets, tokens) for m in call.module.maps(call.grid)]
    return call.module.spec.extra_macs(call.shape, Grid.of(call.grid), rows)
