"""How a model announces the grid of each input, and its blocks keep it (see `grids`)."""

import copy
import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from irpe.adapters.grids import SOURCE, GridSource, InputGrid, grid_of, mark, read_mark
from irpe.adapters.plan import check_instance
from irpe.core.positions import Positions
from irpe.errors import UserError

_FOLLOWED = "rpe_followed_grid"  # the attribute of models and blocks that holds what they follow
_MOST_UNUSED = 64  # announcements remembered that no block has used


class Embedded(NamedTuple):
    """A call of the module that makes tokens of an image.

    Args:
        module: The module.
        inputs: What it was called with.
        keywords: What it was called with by name.
        output: What it returned.
    """

    module: Any
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any


Measure = Callable[[Embedded], InputGrid]


class FollowedGrid(GridSource):
    """The grid of a model that is measured anew for each input.

    Args:
        grid: The grid of the first input to come; `None` if unknown.
        model: The model.
        embedding: The path in the model to the module that makes tokens, or a map, of an image.
        measure: Returns the grid of a call of that module, or positions.
        marks_output: Whether positions are those of the tokens that this module returns. Not so for
            a decoder, whose tokens are made of them later.
    """

    def __init__(
        self,
        grid: Sequence[int] | None,
        model: nn.Module,
        embedding: str,
        measure: Measure,
        marks_output: bool = True,
    ) -> None:
        super().__init__(grid)
        self.model, self.embedding, self.measure = model, embedding, measure
        self.marks_output = marks_output
        self._is_one_grid = grid is not None  # whether all inputs so far had that grid
        self._copied: FollowedGrid | None = None  # what this is a copy of, until the first pass

    def __deepcopy__(self, memo: dict[int, Any]) -> "FollowedGrid":
        """Returns a source for a copy of the model; the copy of a part of it keeps this one."""
        if id(self.model) not in memo:
            return self
        memo[id(self)] = twin = object.__new__(FollowedGrid)
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._copied = self
        return twin

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_copied": None}

    def _adopt_modules(self) -> None:
        """Takes over the modules that were copied before their model, and kept its source."""
        if self._copied is not None:
            for module in self.model.modules():
                for name in (SOURCE, _FOLLOWED):
                    if vars(module).get(name) is self._copied:
                        vars(module)[name] = self
            self._copied = None

    def follow(self) -> Callable[[], None]:
        """Announces the grid from the embedding that the model has now; returns what undoes it."""
        hook = AnnounceGrid(self)
        return self._find_embedding().register_forward_hook(hook, with_kwargs=True).remove

    def announce(self, grid: InputGrid) -> None:
        """Sets the grid of what this thread works on from now on."""
        super().announce(grid)
        if grid != self._initial:
            self._is_one_grid = False
        unused = self._unused_grids()
        if not torch.compiler.is_compiling() and len(unused) < _MOST_UNUSED:
            self._thread.unused = unused | {_identity(grid)}

    def announce_for(self, tokens: Tensor, positions: Positions) -> None:
        """Marks tokens with their positions; a compiled model reads what is announced instead."""
        if torch.compiler.is_compiling():
            super().announce(positions)
        else:
            mark(tokens, positions)

    def start(self) -> None:
        """Starts a pass, for which nothing is announced yet; follows a replaced embedding."""
        before = getattr(self._thread, "announced", self._initial)
        outer = getattr(self._thread, "outer", None)
        self._thread.outer = (before, self._unused_grids(), outer)
        self._thread.announced, self._thread.unused = None, frozenset()
        if not torch.compiler.is_compiling():
            self._adopt_modules()
            if not self._is_following():
                self.follow()

    def end(self) -> None:
        """Ends a pass: what was announced before it, maybe by a pass around it, counts again."""
        outer = getattr(self._thread, "outer", None)
        if outer is not None:  # not so where another hook failed before the pass started
            self._thread.announced, self._thread.unused, self._thread.outer = outer

    def enter(self, tokens: Tensor) -> InputGrid:
        """Makes the grid of these tokens the current one, until `leave`, and returns it."""
        grid = read_mark(tokens)
        if grid is None:
            grid = self.use_announced()
            mark(tokens, grid)
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        self._thread.stack.append(grid)
        return grid

    def leave(self) -> None:
        """Makes the grid the current one that was before `enter`."""
        self._thread.stack.pop()

    def use_announced(self) -> InputGrid:
        """Returns the grid of tokens that no block has seen yet."""
        if not self._is_following():
            raise RuntimeError(
                f"{self.embedding} of the model was replaced after irpe.equip, so that the grid of "
                "this input is not known: call the model itself once, or equip it afterwards"
            )
        grid, unused = self._announced_grid(), self._unused_grids()
        self._thread.unused = frozenset()
        own = _identity(grid)
        rivals = [g for g in unused if g != own and g.num_tokens == own.num_tokens]
        if rivals:
            raise RuntimeError(
                f"{self.embedding} of the model saw grids {rivals[0].text} and {own.text}, which "
                "have as many tokens, before the blocks ran: run the blocks of one input before "
                "the next one enters, or call the model itself"
            )
        return grid

    def _announced_grid(self) -> InputGrid:
        if (
            not self._is_one_grid
            and _is_repeated()
            and getattr(self._thread, "outer", None) is None
        ):
            raise RuntimeError(
                "the grid of these tokens is lost: gradient checkpointing repeats an attention "
                "without its block, or a block on copies of its tokens (offloaded, or by "
                "saved_tensors_hooks); checkpoint whole blocks, without copies"
            )
        return super()._announced_grid()

    def _unused_grids(self) -> "frozenset[_Identity]":
        """Returns the grids announced in this thread since a block last used one."""
        return getattr(self._thread, "unused", frozenset())

    def _find_embedding(self) -> nn.Module:
        return attrgetter(self.embedding)(self.model)

    def _is_following(self) -> bool:
        hooks = self._find_embedding()._forward_hooks.values()
        return any(isinstance(hook, AnnounceGrid) and hook.source is self for hook in hooks)


def _is_repeated() -> bool:
    """Tells whether a backward pass is under way, in which only repeated modules run forward."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class _Identity(NamedTuple):
    """What distinguishes one announcement from another; it must not hold positions, which live on.

    Args:
        num_tokens: The number of tokens.
        text: The grid, or what the positions are.
        number: The positions themselves, as a number; 0 for a grid.
    """

    num_tokens: int
    text: str
    number: int


def _identity(grid: InputGrid) -> _Identity:
    if isinstance(grid, Positions):
        return _Identity(
            grid.num_tokens[0], str(grid), 0 if grid.constant is not None else id(grid)
        )
    return _Identity(math.prod(grid), str(grid), 0)


class AnnounceGrid:
    """A hook on the module that makes tokens of an image: announces the grid of each input.

    Args:
        source: What the attentions read.
    """

    def __init__(self, source: FollowedGrid) -> None:
        self.source = source

    def __call__(
        self, embedding: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        """Announces the grid."""
        grid = self.source.measure(Embedded(embedding, inputs, keywords, output))
        self.source.announce(grid)
        if isinstance(grid, Positions) and self.source.marks_output:
            self.source.announce_for(output[0] if isinstance(output, tuple) else output, grid)


class CarryMark:
    """A hook on a module between the tokens' choice and the first block: keeps their mark."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Marks the output as the input is."""
        grid = read_mark(inputs[0])
        if grid is not None:
            mark(output, grid)


class ToldGrid(GridSource):
    """A grid that `equip` was told, of a model that takes images of several sizes.

    An input with another grid is refused: as many tokens in another shape would go unnoticed.

    Args:
        grid: The grid of every input.
        model: The model.
        embedding: The path in the model to the module that makes tokens, or a map, of an image.
        measure: Returns the grid of a call of that module.
    """

    def __init__(
        self, grid: Sequence[int], model: nn.Module, embedding: str, measure: Measure
    ) -> None:
        super().__init__(grid)
        self.model, self.embedding, self.measure = model, embedding, measure

    def check(self) -> Callable[[], None]:
        """Compares the grid of each input from now on; returns what undoes it."""
        embedding: nn.Module = attrgetter(self.embedding)(self.model)
        return embedding.register_forward_hook(CheckGrid(self), with_kwargs=True).remove


class CheckGrid:
    """A hook on the module that makes tokens of an image: refuses an input with another grid.

    Args:
        source: Knows the grid that every input must have.
    """

    def __init__(self, source: ToldGrid) -> None:
        self.source = source

    def __call__(
        self, embedding: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any
    ) -> None:
        """Raises an error if the grid of this input is another one."""
        found = self.source.measure(Embedded(embedding, inputs, keywords, output))
        if found != self.source.grid:
            raise UserError(
                f"this input has grid {found}, but irpe.equip was told grid {self.source.grid}: "
                "leave grid= out there, and the grid is taken from each input"
            )


def map_source(
    fixed: Sequence[int] | None, grid: Sequence[int] | None, model: nn.Module, convolution: str
) -> GridSource:
    """Returns where attentions find the grid of a model whose tokens come from a convolution.

    Args:
        fixed: The grid of every input, if it is not to be measured.
        grid: The grid of the first input to come; `None` if unknown.
        model: The model.
        convolution: The path in the model to the convolution that makes the feature map.
    """
    if fixed is not None:
        return ToldGrid(fixed, model, convolution, _measure_map)
    return followed_grid(model) or FollowedGrid(grid, model, convolution, _measure_map)


def _measure_map(call: Embedded) -> tuple[int, ...]:
    """Returns the grid of a convolution's output: batch, channels, rows, columns, or a video's."""
    return tuple(call.output.shape[2:])


def _start_pass(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A hook before a model's forward."""
    vars(model)[_FOLLOWED].start()


def _end_pass(model: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    """A hook after a model's forward."""
    vars(model)[_FOLLOWED].end()


class _FollowingBlock(nn.Module):
    """What a block's class gets in front of it: runs the block on the grid of its tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the block returns, its tokens marked with their grid."""
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        tokens = None if torch.compiler.is_compiling() else next(tensors, None)
        if tokens is None:  # also where torch.fx traces the model
            return super().forward(*args, **kwargs)
        source: FollowedGrid = vars(self)[_FOLLOWED]
        grid = source.enter(tokens)
        try:
            output = super().forward(*args, **kwargs)
        finally:
            source.leave()
        mark(output[0] if isinstance(output, tuple) else output, grid)
        return output

    def __reduce_ex__(self, protocol: Any) -> Any:
        _, _, *state = super().__reduce_ex__(protocol)
        return _make_following, (type(self).__bases__[1],), *state


@cache
def _following_class(block_class: type[nn.Module]) -> type[nn.Module]:
    """Returns a subclass of a block's class, under the name that libraries look blocks up by."""
    names = ("__doc__", "__module__", "__qualname__")
    body = {name: getattr(block_class, name) for name in names}
    return type(block_class.__name__, (_FollowingBlock, block_class), body)


def _make_following(block_class: type[nn.Module]) -> nn.Module:
    following_class: Any = _following_class(block_class)
    return following_class.__new__(following_class)


def follow_grid(source: GridSource, blocks: Collection[nn.Module]) -> Callable[[], object]:
    """Makes a model announce the grid of each input and its blocks keep it.

    Hooks on the blocks would not do: transformers repeats a block's `forward` alone.

    Args:
        source: Where the attentions of the model find the grid.
        blocks: The blocks with these attentions; their first argument is the tokens.

    Returns:
        What undoes it.
    """
    if isinstance(source, ToldGrid):
        return source.check()
    if not isinstance(source, FollowedGrid) or _FOLLOWED in vars(source.model):
        return lambda: None  # one grid for all inputs, or followed since an earlier call of equip
    for block in blocks:
        check_instance(f"a {type(block).__qualname__}", block)
    undo = ExitStack()
    undo.callback(source.follow())
    undo.callback(source.model.register_forward_pre_hook(_start_pass, prepend=True).remove)
    undo.callback(source.model.register_forward_hook(_end_pass, always_call=True).remove)
    for module in (source.model, *blocks):
        vars(module)[_FOLLOWED] = source
        undo.callback(vars(module).pop, _FOLLOWED)
    for block in blocks:
        undo.callback(setattr, block, "__class__", type(block))
        block.__class__ = _following_class(type(block))
    return undo.close


def followed_grid(model: nn.Module) -> FollowedGrid | None:
    """Returns the grid that a model follows since an earlier call of `equip`, if it does."""
    return vars(model).get(_FOLLOWED)


def grid_after(block: nn.Module, tokens: Tensor) -> tuple[int, ...]:
    """Returns the grid of the tokens that came out of an equipped block."""
    source, grid = grid_of(block), None
    if isinstance(source, FollowedGrid):
        grid = read_mark(tokens)
    grid = source.current() if grid is None else grid
    assert not isinstance(grid, Positions)  # models that drop tokens are refused
    return grid
