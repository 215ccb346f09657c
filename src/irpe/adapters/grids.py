"""How the grid of a forward pass reaches the attentions in it.

Blocks hand their attentions tokens and nothing else, so the grid takes another way. It must not be
an attribute that one forward writes and another reads: threads, repeated blocks and interleaved
passes over one model would then use the grid of another input, silently where both have the same
number of tokens. Three steps lead it from the image to the attention:

1. A hook on the module that makes tokens of an image announces the grid to the thread it runs in.
2. A block marks the tokens that enter and leave it with their grid; unmarked tokens, those of the
   first block, have the grid that was announced last in this thread. The mark is an attribute of
   their storage, which the detached copies share that gradient checkpointing makes, and which is
   freed with them. So a block that is repeated later, in any thread, knows its grid.
3. While a block runs, its grid is on top of a stack of the thread, where its attentions read it;
   a model that is called inside a block has its own, and leaves the stack as it was.

`torch.compile` traces reads and writes of `threading.local` and guards on them for each thread. It
does not trace marks, so in a compiled model the attentions read what was announced last.
Marks and announcements rather than one of them: tokens between the image and the first block are
made by the host's own code, which loses marks; an announcement alone is lost when blocks are
repeated or interleaved. A context variable cannot be set in a compiled model.

What remains wrong: code of your own that runs the embeddings of two inputs with as many tokens
before the first block of either, in one thread, or that changes tokens between interleaved blocks;
and blocks that are compiled one by one and then repeated by gradient checkpointing, with inputs of
several shapes and as many tokens in one step.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

SOURCE = "rpe_grid"  # the attribute of attentions and blocks that holds their source
_FOLLOWED = "rpe_followed_grid"  # the attribute of models and blocks that holds what they follow
_MARK = "_irpe_grid"  # the attribute of a storage that holds the grid of its tokens

Measure = Callable[[Any, Tensor, Tensor], tuple[int, ...]]


class GridSource:
    """Where attentions find the grid of the forward pass that they are in.

    Args:
        grid: The grid of every input; where a model measures it anew for each, the one before.
    """

    def __init__(self, grid: Sequence[int] | None) -> None:
        self._initial = self._last = None if grid is None else tuple(grid)
        self._thread = threading.local()

    @property
    def grid(self) -> tuple[int, ...] | None:
        """The last grid of any thread, or that of the first input to come; `None` if unknown."""
        return self._last

    @grid.setter
    def grid(self, grid: Sequence[int]) -> None:
        self._initial = self._last = tuple(grid)

    def announce(self, grid: tuple[int, ...]) -> None:
        """Sets the grid of what this thread works on from now on."""
        self._last = self._thread.announced = grid

    def current(self) -> tuple[int, ...]:
        """Returns the grid of the block that this thread is in, or else the one announced last."""
        stack = getattr(self._thread, "stack", None)
        return stack[-1] if stack else self._announced_grid()

    def _announced_grid(self) -> tuple[int, ...]:
        grid = getattr(self._thread, "announced", self._initial)
        if grid is None:
            raise RuntimeError(
                "the grid of this input is not known: call the model on images, or pass grid= to "
                "irpe.equip"
            )
        return grid

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _thread=threading.local())


class FollowedGrid(GridSource):
    """The grid of a model that is measured anew for each input.

    Args:
        grid: The grid of the first input to come; `None` if unknown.
        model: The model.
        embedding: The path in the model to the module that makes tokens, or a map, of an image.
        measure: Returns the grid, given that module, its input and its output.
    """

    def __init__(
        self, grid: Sequence[int] | None, model: nn.Module, embedding: str, measure: Measure
    ) -> None:
        super().__init__(grid)
        self.model, self.embedding, self.measure = model, embedding, measure

    def follow(self) -> Callable[[], None]:
        """Announces the grid from the embedding that the model has now; returns what undoes it."""
        return self._find_embedding().register_forward_hook(AnnounceGrid(self)).remove

    def start(self) -> None:
        """Starts a pass, for which nothing is announced yet; follows a replaced embedding."""
        before = getattr(self._thread, "announced", self._initial)
        self._thread.outer = (before, getattr(self._thread, "outer", None))
        self._thread.announced = None
        if not torch.compiler.is_compiling() and not self._is_following():
            self.follow()

    def end(self) -> None:
        """Ends a pass: what was announced before it, maybe by a pass around it, counts again."""
        outer = getattr(self._thread, "outer", None)
        if outer is not None:  # not so where another hook failed before the pass started
            self._thread.announced, self._thread.outer = outer

    def enter(self, tokens: Tensor) -> tuple[int, ...]:
        """Makes the grid of these tokens the current one, until `leave`, and returns it."""
        grid = _read_mark(tokens)
        if grid is None:
            self._check_following()
            grid = self._announced_grid()
            mark(tokens, grid)
        if not hasattr(self._thread, "stack"):
            self._thread.stack = []
        self._thread.stack.append(grid)
        return grid

    def leave(self) -> None:
        """Makes the grid the current one that was before `enter`."""
        self._thread.stack.pop()

    def _check_following(self) -> None:
        if not self._is_following():
            raise RuntimeError(
                f"{self.embedding} of the model was replaced after irpe.equip, so that the grid of "
                "this input is not known: call the model itself once, or equip it afterwards"
            )

    def _find_embedding(self) -> nn.Module:
        return attrgetter(self.embedding)(self.model)

    def _is_following(self) -> bool:
        hooks = self._find_embedding()._forward_hooks.values()
        return any(isinstance(hook, AnnounceGrid) and hook.source is self for hook in hooks)


class AnnounceGrid:
    """A hook on the module that makes tokens of an image: announces the grid of each input.

    Args:
        source: What the attentions read.
    """

    def __init__(self, source: FollowedGrid) -> None:
        self.source = source

    def __call__(self, embedding: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Announces the grid."""
        self.source.announce(self.source.measure(embedding, inputs[0], output))


def map_source(
    told: Sequence[int] | None, grid: Sequence[int] | None, model: nn.Module, convolution: str
) -> GridSource:
    """Returns where attentions find the grid of a model whose tokens come from a convolution.

    Args:
        told: The grid of every input, if it is not to be measured.
        grid: The grid of the first input to come; `None` if unknown.
        model: The model.
        convolution: The path in the model to the convolution that makes the feature map.
    """
    if told is not None:
        return GridSource(told)
    return followed_grid(model) or FollowedGrid(grid, model, convolution, _measure_map)


def _measure_map(embedding: nn.Module, image: Tensor, output: Tensor) -> tuple[int, ...]:
    """Returns the grid of a convolution's output: batch, channels, rows, columns."""
    return tuple(output.shape[-2:])


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
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        source: FollowedGrid = vars(self)[_FOLLOWED]
        grid = source.enter(args[0] if args else next(iter(kwargs.values())))
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
    if not isinstance(source, FollowedGrid) or _FOLLOWED in vars(source.model):
        return lambda: None  # one grid for all inputs, or followed since an earlier call of equip
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


def grid_of(module: nn.Module) -> GridSource:
    """Returns where an equipped attention, or block, takes its grid from."""
    source: object = vars(module)[SOURCE]
    assert isinstance(source, GridSource)
    return source


def grid_after(block: nn.Module, tokens: Tensor) -> tuple[int, ...]:
    """Returns the grid of the tokens that came out of an equipped block."""
    source, grid = grid_of(block), None
    if isinstance(source, FollowedGrid) and not torch.compiler.is_compiling():
        grid = _read_mark(tokens)
    return source.current() if grid is None else grid


def mark(tokens: Tensor, grid: tuple[int, ...]) -> None:
    """Marks tokens with their grid, for the next block."""
    storage: Any = _storage_of(tokens)
    if storage is not None:
        setattr(storage, _MARK, grid)


def _read_mark(tokens: Tensor) -> tuple[int, ...] | None:
    return getattr(_storage_of(tokens), _MARK, None)


def _storage_of(tokens: Tensor) -> object:
    try:
        return tokens.untyped_storage()
    except NotImplementedError:  # in a transform of torch.func, whose tensors have none
        return None
