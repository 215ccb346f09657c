"""How the grid of a forward pass reaches the attentions in it.

A block passes its attention tokens alone, so the grid has to get there in another way. It must not
be an attribute that one forward pass writes and another reads: threads, repeated blocks and
interleaved passes over one model would then use the grid of another input, silently where both have
the same number of tokens. Three steps lead from the image to the attention:

1. A hook on the module that makes tokens of an image announces the grid to the current thread.
2. A block marks the tokens that enter and leave it with their grid; unmarked tokens, those of the
   first block, have the grid that was announced last in this thread. The mark is an attribute of
   the storage of the tokens. Gradient checkpointing repeats blocks on the same tokens, or on
   detached copies that share the storage, so a repeated block finds its grid in any thread.
3. While a block runs, its grid is on top of a stack of the thread, where its attentions read it. A
   model that is called inside a block pushes its own grid and removes it again.

`torch.compile` traces reads and writes of `threading.local` and guards on them for each thread. It
does not trace marks, so in a compiled model the attentions read what was announced last.
Both marks and announcements are needed: tokens between the image and the first block are made by
the host's own code, which loses marks; an announcement alone is lost when blocks are repeated or
interleaved. A context variable cannot be set in a compiled model.

Where some tokens are dropped, or images differ in size, `irpe.Positions` travel in the place of the
grid. The module that chooses the tokens marks them itself, so that no announcement comes between.

What remains wrong where inputs of several shapes have the same number of tokens: code that
interleaves the blocks of two passes in one thread and changes tokens between blocks; and blocks
that are compiled one by one and then repeated by gradient checkpointing.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from irpe.core.positions import Positions

InputGrid = tuple[int, ...] | Positions  # of one input: its grid, or where its tokens are instead

SOURCE = "rpe_grid"  # the attribute of attentions and blocks that holds their source
_MARK = "_irpe_grid"  # the attribute of a storage that holds the grid of its tokens


class GridSource:
    """Where attentions find the grid of the forward pass that they are in.

    Args:
        grid: The grid of every input; where a model measures it anew for each, the one before.
    """

    _initial: InputGrid | None
    _last: InputGrid | None

    def __init__(self, grid: Sequence[int] | None) -> None:
        self._initial = self._last = None if grid is None else tuple(grid)
        self._thread = threading.local()

    @property
    def grid(self) -> InputGrid | None:
        """The last grid of any thread, or that of the first input to come; `None` if unknown.

        Positions that differ from image to image are not kept: the grid that they are on stands for
        them.
        """
        return self._last

    @grid.setter
    def grid(self, grid: Sequence[int]) -> None:
        self._initial = self._last = tuple(grid)

    def announce(self, grid: InputGrid) -> None:
        """Sets the grid of what this thread works on from now on."""
        self._thread.announced = grid
        if not isinstance(grid, Positions) or grid.constant is not None:
            self._last = grid
        elif grid.grid is not None:
            self._last = grid.grid.shape

    def current(self) -> InputGrid:
        """Returns the grid of the block that this thread is in, or else the one announced last."""
        stack = getattr(self._thread, "stack", None)
        return stack[-1] if stack else self._announced_grid()

    def _announced_grid(self) -> InputGrid:
        grid = getattr(self._thread, "announced", self._initial)
        if grid is None:
            raise RuntimeError(
                "the grid of this input is not known: call the model on images (once without "
                "torch.compile, if its embedding was replaced), or pass grid= to irpe.equip"
            )
        return grid

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _thread=threading.local())


def grid_of(module: nn.Module) -> GridSource:
    """Returns where an equipped attention, or block, takes its grid from."""
    source: object = vars(module)[SOURCE]
    assert isinstance(source, GridSource)
    return source


def mark(tokens: Tensor, grid: InputGrid) -> None:
    """Marks tokens with their grid, for the next block."""
    storage: Any = _storage_of(tokens)
    if storage is not None:
        setattr(storage, _MARK, (grid, _version_of(tokens)))


def read_mark(tokens: Tensor) -> InputGrid | None:
    """Returns the grid that tokens are marked with, if they are; a compiler sees no marks.

    A mark does not count once other tokens were written in their place.
    """
    if torch.compiler.is_compiling():
        return None
    grid, version = getattr(_storage_of(tokens), _MARK, (None, None))
    return grid if version == _version_of(tokens) else None


def _version_of(tokens: Tensor) -> int | None:
    """Returns how often a tensor was written to; tensors of inference mode do not count that."""
    return None if tokens.is_inference() else tokens._version


def _storage_of(tokens: Tensor) -> object:
    try:
        return tokens.untyped_storage()
    except NotImplementedError:  # in a transform of torch.func, whose tensors have none
        return None
