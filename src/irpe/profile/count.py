"""What a model has and does: its parameters and its multiply-accumulates.

What an encoding adds is also known in closed form, which must be what the counter finds. With n
tokens, h heads of dimension d, and k rows of a table that are used on the grid:

- a table of vectors costs h n d min(k, n): Eq. 27 over the used rows, or over all pairs if they are
  fewer (Eq. 26); a bias costs nothing, it is looked up and added
- an encoding that differs says so itself (`extra_macs` in `irpe.core.encodings`)
- CPVT costs nine products for each number of a patch token
"""

import math
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from irpe.core.grid import Grid
from irpe.core.positions import Positions
from irpe.nn.generator import PositionGenerator
from irpe.nn.tables import RelativePositionEncoding


def count_parameters(model: nn.Module) -> int:
    """Returns the number of learned parameters of a model.

    Examples:
        >>> import irpe.profile, timm
        >>> irpe.profile.count_parameters(timm.create_model("vit_tiny_patch16_224"))
        5717416
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def count_macs(model: nn.Module, *inputs: Tensor) -> int:
    """Returns the multiply-accumulates of one forward pass in eval mode, counted on the operations.

    Args:
        model: The model; its training mode is as before afterwards.
        inputs: What it is called with.

    Examples:
        >>> import irpe.profile, timm, torch
        >>> model = timm.create_model("vit_tiny_patch16_224", depth=1)
        >>> macs = irpe.profile.count_macs(model, torch.randn(1, 3, 224, 224))
    """
    return count_macs_in(model, lambda: model(*inputs))


def count_macs_in(model: nn.Module, run: Callable[[], object]) -> int:
    """Returns the multiply-accumulates of a function that calls a model, then in eval mode."""
    was_training = model.training
    learned = [p for p in model.parameters() if p.requires_grad]
    counter: Any = FlopCounterMode(display=False)
    try:
        for parameter in learned:  # the counter fails where a module is given one that learns
            parameter.requires_grad_(False)
        with torch.no_grad(), counter:
            model.eval()
            run()
    finally:
        model.train(was_training)
        for parameter in learned:
            parameter.requires_grad_(True)
    return counter.get_total_flops() // 2  # a multiply-accumulate is two operations


@dataclass(frozen=True)
class Call:
    """One use of an encoding in a forward pass."""

    module: RelativePositionEncoding | PositionGenerator
    shape: torch.Size  # of the queries, or of the tokens
    grid: tuple[int, ...] | Positions
    num_keys: int  # or of tokens


@contextmanager
def recorded_calls(model: nn.Module) -> Generator[list[Call]]:
    """Notes how a model uses its encodings, as long as the context lasts."""
    calls: list[Call] = []

    def note(module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        grid = named["grid"] if "grid" in named else inputs[1]
        grid = grid if isinstance(grid, Positions) else tuple(grid)
        keys = inputs[1] if isinstance(module, RelativePositionEncoding) else inputs[0]
        calls.append(Call(module, inputs[0].shape, grid, keys.shape[-2]))

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
        assert not isinstance(call.grid, Positions)
        batch, _, dim = call.shape
        return batch * math.prod(call.grid) * dim * call.module.weight[0].numel()
    rows = [min(m.num_used_buckets, call.num_keys) for m in call.module.maps(call.grid)]
    spec = call.module.spec
    if not isinstance(call.grid, Positions):
        return spec.extra_macs(call.shape, Grid.of(call.grid), rows)
    if call.grid.grid is not None:
        return spec.extra_macs(call.shape, call.grid.grid, rows)
    if spec.mode == "bias":
        return 0
    batch, heads, queries, dim = call.shape  # Eq. 27: each token meets each row in use
    used = [m.num_used_buckets for m in call.module.maps(call.grid)]
    by_query = queries * sum(rows)
    by_key = call.num_keys * sum(min(count, queries) for count in used)
    macs = sum(by_key if target == "q" else by_query for target in spec.targets)
    return batch * heads * dim * macs
