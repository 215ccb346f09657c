"""How the attentions of a model learn the grid of each input, whatever library it comes from."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary


class GridSource:
    """The grid of the input that a model works on, shared by the attentions that see this grid.

    Args:
        grid: The grid, if it is known before the first input.
    """

    def __init__(self, grid: Sequence[int] | None) -> None:
        self.grid = None if grid is None else tuple(grid)

    def current(self) -> tuple[int, ...]:
        """Returns the grid of the current input."""
        if self.grid is None:
            raise RuntimeError("the grid is not known before the model has seen its first input")
        return self.grid


def grid_of(attention: nn.Module) -> GridSource:
    """Returns where an equipped attention takes its grid from."""
    source: object = attention.__dict__["rpe_grid"]
    assert isinstance(source, GridSource)
    return source


class RecordFeatureMap:
    """A hook on the convolution that makes the patches: notes the grid of each input.

    Args:
        source: Where the attentions look the grid up.
    """

    def __init__(self, source: GridSource) -> None:
        self.source = source

    def __call__(self, convolution: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Notes the grid."""
        height, width = output.shape[-2:]
        self.source.grid = (height, width)


class RecallGrid:
    """A hook on the blocks that knows the grid again when gradient checkpointing repeats them.

    The tokens that enter a block belong to one input. Checkpointing hands the same tokens to the
    first block that it repeats, maybe after the model has seen an input with another grid.

    Args:
        source: Where the attentions look the grid up.
    """

    def __init__(self, source: GridSource) -> None:
        self.source = source
        self.grids = WeakIdKeyDictionary()

    def __call__(self, block: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Notes the grid of the tokens, or recalls it."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        self.source.grid = self.grids.setdefault(inputs[0], self.source.grid)

    def __reduce__(self) -> tuple[Any, ...]:
        return RecallGrid, (self.source,)


def follow_grid(
    embedding: nn.Module,
    record: Callable[..., None],
    blocks: Iterable[nn.Module],
    source: GridSource,
) -> Callable[[], None]:
    """Keeps the grid up to date, input by input.

    Args:
        embedding: The module that makes tokens of an image.
        record: The hook on it that notes the grid.
        blocks: The blocks with the attentions; their first argument is the tokens.
        source: Where the attentions look the grid up.
    """
    recall = RecallGrid(source)
    handles = [
        embedding.register_forward_hook(record),
        *(block.register_forward_pre_hook(recall) for block in blocks),
    ]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo
