"""How the attentions of a model learn the grid of each input, whatever library it comes from."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from irpe.adapters.plan import GridSource, Undo


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
) -> Undo:
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
