"""How the grid of an input reaches the attentions in a forward pass.

Where an attention knows its grid (a window, a map that it is given), it is read at the call. Where
a block passes its attention tokens alone, the grid has to get there in another way. It must not be
an attribute that one pass writes and another reads: threads, repeated blocks and interleaved passes
over one model would then use the grid of another input. Three steps lead from the image to there:

1. A hook on the module that makes tokens of an image announces the grid to the current thread.
2. A block looks the grid up by the number of its tokens, and marks the tokens that enter and leave
   it. The mark is an attribute of the storage of the tokens: gradient checkpointing repeats blocks
   on the same tokens, or on detached copies that share the storage, in any thread.
3. While a block runs, its attentions read its grid from the current thread.

`torch.compile` traces reads and writes of `threading.local` and guards on them for each thread. It
traces no marks, so in a compiled model the attentions read what was announced last. Where some
tokens are dropped, or images differ in size, `irpe.Positions` travel in the place of the grid; the
module that chooses the tokens marks them itself.

Two grids of one number of tokens, announced before the blocks of either ran, are an error. What
remains wrong with such grids: code that interleaves the blocks of two passes in one thread and
changes tokens between blocks; and blocks that are compiled one by one and then repeated.
"""

import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache, partial
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from irpe.adapters.swaps import Swap, add_hook, set_attribute, set_class
from irpe.core.positions import AugmentedGrid, Positions
from irpe.errors import UserError, UserStateError

Measured = tuple[int, ...] | Positions  # of one input: its grid, or where its tokens are instead
InputGrid = Measured | AugmentedGrid  # in training, with the random numbers of a pass

SOURCE = "rpe_grid"  # the attribute of attentions and blocks that holds their source
AUGMENTS = "_rpe_augments"  # the attribute of a model whose encodings augment positions
LAST = "_rpe_last_grid"  # the attribute of an attention that holds the grid of its last input
_MARK = "_irpe_grid"  # the attribute of a storage that holds the grid of its tokens
_LOST = (
    "the grid of these tokens is lost: gradient checkpointing repeats an attention without its "
    "block, or a block on copies of its tokens (offloaded, or by saved_tensors_hooks), and several "
    "grids have as many; checkpoint whole blocks, without copies"
)
_thread = threading.local()
_keys = itertools.count(1)
_seen: defaultdict[tuple[str, int], set[tuple[int, ...]]] = defaultdict(set)


class Embedded(NamedTuple):
    """A call of the module that makes tokens of an image."""

    module: Any
    inputs: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Any = None


Measure = Callable[[Embedded], Measured]


@dataclass
class _Pass:
    """What was announced in one forward pass of a thread.

    Args:
        outer: The pass around it.
        last: The last grid.
        grids: By the number of tokens, those that no block has used yet, or the one that was used.
        used: The numbers of tokens whose grid was used.
        block: The grid of the block that runs; `None` outside of blocks.
    """

    outer: "_Pass | None" = None
    last: InputGrid | None = None
    grids: dict[int, tuple[InputGrid, ...]] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    block: InputGrid | None = None


@dataclass(frozen=True)
class MeasuredGrid:
    """A grid that is measured for each input: a value, which copies of a model share.

    Args:
        embedding: The path in the model to the module that makes tokens, or a map, of an image.
        measure: Returns the grid of a call of that module, or positions.
        num_prefix_tokens: How many tokens stand before the patches in a block.
        initial: The grid of the first input to come; `None` if unknown.
        told: The grid that every input must have, since `equip` was told so; `None` if any.
        marks_output: Whether positions are those of the tokens that this module returns. Not so for
            a decoder, whose tokens are made of them later.
        before: Whether the grid is measured before the module runs.
        key: What its announcements are stored under.
    """

    embedding: str
    measure: Measure
    num_prefix_tokens: int = 0
    initial: tuple[int, ...] | None = None
    told: tuple[int, ...] | None = None
    marks_output: bool = True
    before: bool = False
    key: str = field(default_factory=lambda: f"grids_{next(_keys)}")

    def announce(self, grid: InputGrid) -> None:
        """Sets the grid of what this thread works on from now on."""
        if self.told is not None and grid != self.told:
            raise UserError(
                f"this input has grid {grid}, but irpe.equip was told grid {self.told}: "
                "leave grid= out there, and the grid is taken from each input"
            )
        now = self.current_pass()
        now.last = grid
        if torch.compiler.is_compiling():
            return
        count = self._num_tokens(grid)
        others = () if count in now.used else now.grids.get(count, ())
        now.used.discard(count)
        now.grids[count] = (*(other for other in others if not _is_same(other, grid)), grid)
        if isinstance(grid, tuple):
            _seen[self.key, count].add(grid)

    def mark_positions(self, tokens: Tensor, positions: InputGrid) -> None:
        """Marks tokens with their positions; a compiled model reads what is announced instead."""
        if torch.compiler.is_compiling():
            self.current_pass().last = positions
        else:
            mark(tokens, positions)

    def of_attention(self, tokens: Tensor) -> InputGrid:
        """Returns the grid of the tokens that an attention gets."""
        if self.told is not None:
            return self.told
        if torch.compiler.is_compiling():
            return self._last()
        now: _Pass | None = getattr(_thread, self.key, None)
        if now is not None and now.block is not None:
            return now.block
        return self._announced(self.current_pass(), tokens.shape[-2])[-1]

    def of_new_tokens(self, tokens: Tensor, now: _Pass) -> InputGrid:
        """Returns the grid of tokens that no block has seen yet."""
        count = tokens.shape[-2]
        grids = self._announced(now, count)
        if len(grids) > 1:
            first, second = map(str, grids[-2:])
            raise UserStateError(
                f"{self.embedding} of the model saw grids {first} and {second}, which have as many "
                "tokens, before the blocks ran: run the blocks of one input before the next one "
                "enters, or call the model itself"
            )
        now.used.add(count)
        return grids[-1]

    def _announced(self, now: _Pass, count: int) -> Sequence[InputGrid]:
        """Returns the grids of this number of tokens, prefix included, in a pass."""
        if now.outer is None and _is_repeated():
            grids = _seen[self.key, count]
            if len(grids) == 1:
                return (*grids,)
            raise UserStateError(_LOST)
        if count in now.grids:
            return now.grids[count]
        grid = self._last()
        if now.last is None and count != self._num_tokens(grid):
            raise UserStateError(
                f"{count} tokens, and no image whose grid has as many: {self.embedding} was called "
                "in another thread, or replaced after irpe.equip; call the model itself"
            )
        return (grid,)

    def _num_tokens(self, grid: InputGrid) -> int:
        where = grid if isinstance(grid, tuple) else without_sample(grid)
        is_positions = isinstance(where, Positions)
        return where.num_tokens[0] if is_positions else self.num_prefix_tokens + prod(where)

    def _last(self) -> InputGrid:
        now = self.current_pass()
        grid = self.initial if now.last is None and now.outer is None else now.last
        if grid is None:
            raise UserStateError(
                "the grid of this input is not known: call the model on images (once without "
                "torch.compile, if its embedding was replaced), or pass grid= to irpe.equip"
            )
        return grid

    def current_pass(self) -> _Pass:
        """Returns what was announced to this thread."""
        now = getattr(_thread, self.key, None)
        if now is None:
            now = _Pass()
            setattr(_thread, self.key, now)
        return now

    def is_followed(self, model: nn.Module) -> bool:
        """Returns whether the embedding that a model has now announces its grids."""
        embedding: Any = attrgetter(self.embedding)(model) if self.embedding else model
        hooks = embedding._forward_pre_hooks if self.before else embedding._forward_hooks
        return any(isinstance(h, _Announce) and h.source.key == self.key for h in hooks.values())

    def hook_embedding(self, model: nn.Module) -> list[Swap]:
        """Returns the hook that announces the grid from the embedding that a model has now."""
        embedding: Any = attrgetter(self.embedding)(model) if self.embedding else model
        return add_hook(embedding, _Announce(self, model), before=self.before, with_kwargs=True)

    def follow(self, model: nn.Module, blocks: Collection[nn.Module]) -> list[Swap]:
        """Returns what makes a model announce the grid of each input and its blocks keep it.

        Hooks on the blocks would not do: transformers repeats a block's `forward` alone.

        Args:
            model: The model.
            blocks: The blocks with attentions; their first argument is the tokens.
        """
        if source_of(model) is not None:  # since an earlier call of `equip`
            return []
        swaps = [*self.hook_embedding(model), *set_attribute(model, SOURCE, self)]
        if self.told is not None:
            return swaps
        swaps += add_hook(model, partial(_start_pass, self), before=True)
        swaps += add_hook(model, partial(_end_pass, self), always_call=True)
        for block in blocks:
            swaps += set_attribute(block, SOURCE, self)
            swaps += set_class(block, _following_class(type(block)))
        return swaps


def augment_positions(
    model: nn.Module, change: Sequence[Swap], attentions: Sequence[nn.Module]
) -> list[Swap]:
    """Returns what makes a model make random numbers for each pass in training."""
    hooks = [swap.value for swap in change]
    for module in model.modules():
        hooks += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    owners = {hook.source.key: hook.model for hook in hooks if isinstance(hook, _Announce)}
    sources = {id(swap.owner): swap.value for swap in change if swap.key == SOURCE}
    found: dict[int, nn.Module] = {}
    for attention in attentions:
        source = sources.get(id(attention)) or source_of(attention)
        if source is None or source.told is not None or source.key not in owners:
            raise UserError(
                f"positions cannot be augmented in {type(model).__qualname__}: a "
                f"{type(attention).__qualname__} works on windows or maps of its own, or on a "
                "grid= that irpe.equip was told; leave grid= out, or the augmentation"
            )
        owner = owners[source.key]
        found[id(owner)] = owner
    return [swap for owner in found.values() for swap in set_attribute(owner, AUGMENTS, True)]


def told_grid(grid: tuple[int, ...] | None) -> MeasuredGrid:
    """Returns the grid of a model that knows none: `equip` is told it, and nothing is measured."""
    return MeasuredGrid("", _measure_map, told=grid)


def measured_map(
    model: nn.Module,
    convolution: str,
    num_prefix_tokens: int,
    initial: Sequence[int] | None,
    told: tuple[int, ...] | None,
) -> MeasuredGrid:
    """Returns where attentions find the grid of a model whose tokens come from a convolution."""
    initial = None if initial is None else tuple(initial)
    made = MeasuredGrid(convolution, _measure_map, num_prefix_tokens, initial, told)
    return made if told is not None else source_of(model) or made


def _measure_map(call: Embedded) -> tuple[int, ...]:
    """Returns the grid of a convolution's output: batch, channels, rows, columns, or a video's."""
    return tuple(call.output.shape[2:])


def source_of(module: nn.Module) -> MeasuredGrid | None:
    """Returns where a model, block or attention takes its grid from, if that is measured."""
    return vars(module).get(SOURCE)


def record_grid(attention: nn.Module, grid: InputGrid) -> None:
    """Records the grid of an attention's last input, for `irpe.summary` alone."""
    grid = without_sample(grid)
    if isinstance(grid, Positions) and grid.constant is None:
        if grid.grid is None:
            return
        grid = grid.grid.shape
    vars(attention)[LAST] = grid


def recorded_grid(attention: nn.Module) -> Measured | None:
    """Returns the grid of an attention's last input, or of the first to come, if it is known."""
    source, last = source_of(attention), vars(attention).get(LAST)
    initial = None if source is None else source.told or source.initial
    return initial if last is None else last


def check_told(attention: nn.Module, num_patches: int) -> None:
    """Raises an error if an attention whose model knows no grid gets tokens of another one."""
    source = source_of(attention)
    told = None if source is None or source.embedding else source.told
    if told is not None and prod(told) != num_patches:
        raise UserError(
            f"{num_patches} patches, but irpe.equip was told grid {told}: inputs of another size "
            "need irpe.unequip(model) first, then irpe.equip with their grid="
        )


def check_exportable(grid: InputGrid) -> None:
    """Raises an error if a program would be exported whose images have grids of several shapes."""
    if not torch.compiler.is_exporting() or not isinstance(grid, tuple):
        return
    from torch.fx.experimental.symbolic_shapes import has_static_value  # slow to import

    if not all(map(has_static_value, grid)):
        raise UserError(
            f"the exported program would have one grid, but its images have a dynamic one, {grid}: "
            "export one program for each size, without dynamic_shapes for the sides of images"
        )


def grid_after(block: nn.Module, tokens: Tensor) -> tuple[int, ...]:
    """Returns the grid of the tokens that came out of an equipped block."""
    source: Any = source_of(block)
    grid = None if source.told else read_mark(tokens)
    grid = without_sample(source.of_attention(tokens) if grid is None else grid)
    assert isinstance(grid, tuple)  # models that drop tokens are refused
    return grid


def without_sample(grid: InputGrid) -> Measured:
    """Returns a grid, or positions, without the random numbers of a pass."""
    return grid.where if isinstance(grid, AugmentedGrid) else grid


def mark(tokens: Tensor, grid: InputGrid) -> None:
    """Marks tokens with their grid, for the next block."""
    storage, version = _storage_of(tokens)
    if storage is not None:
        setattr(storage, _MARK, (grid, version))


def read_mark(tokens: Tensor) -> InputGrid | None:
    """Returns the grid that tokens are marked with, if they are; a compiler sees no marks.

    A mark does not count once other tokens were written in their place.
    """
    if torch.compiler.is_compiling():
        return None
    storage, now = _storage_of(tokens)
    grid, version = getattr(storage, _MARK, (None, None))
    return grid if version == now else None


class CarryMark:
    """A hook on a module between the tokens' choice and the first block: keeps their mark."""

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Marks the output as the input is."""
        grid = read_mark(inputs[0])
        if grid is not None:
            mark(output, grid)


@dataclass(frozen=True)
class _Announce:
    """A hook on the module that makes tokens of an image: announces the grid of each input.

    In training it makes the random numbers of a pass, where some encoding of the model needs them.
    """

    source: MeasuredGrid
    model: nn.Module

    def __call__(
        self,
        embedding: nn.Module,
        inputs: tuple[Any, ...],
        keywords: dict[str, Any],
        output: Any = None,
    ) -> None:
        source = self.source
        where = source.measure(Embedded(embedding, inputs, keywords, output))
        if torch.compiler.is_compiling():
            check_exportable(where)
        grid: InputGrid = where
        if self.model.training and getattr(self.model, AUGMENTS, False):
            tensors = (x for x in (*inputs, *keywords.values()) if isinstance(x, Tensor))
            grid = AugmentedGrid.of(where, device=next(tensors).device)
        source.announce(grid)
        if isinstance(where, Positions) and source.marks_output:
            source.mark_positions(output[0] if isinstance(output, tuple) else output, grid)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Announce":
        """Returns the hook of a copy; the copy of an embedding alone belongs to the same model."""
        return _Announce(deepcopy(self.source, memo), memo.get(id(self.model), self.model))


def _start_pass(source: MeasuredGrid, model: nn.Module, inputs: tuple[Any, ...]) -> None:
    """A hook before a model's forward: nothing is announced yet; follows a replaced embedding."""
    if torch.compiler.is_exporting():  # while the sides of images are known to be dynamic
        for x in inputs:
            if isinstance(x, Tensor) and x.ndim > 3:
                check_exportable(tuple(x.shape[2:]))
    setattr(_thread, source.key, _Pass(getattr(_thread, source.key, None) or _Pass()))
    if not torch.compiler.is_compiling() and not source.is_followed(model):
        for swap in source.hook_embedding(model):
            swap.exchange()


def _end_pass(source: MeasuredGrid, model: nn.Module, inputs: tuple[Any, ...], _: Any) -> None:
    """A hook after a model's forward: what was announced before it, maybe around it, counts."""
    now: _Pass | None = getattr(_thread, source.key, None)
    if now is not None and now.outer is not None:  # not so where a hook failed before the start
        setattr(_thread, source.key, now.outer)


class _FollowingBlock(nn.Module):
    """What a block's class gets in front of it: runs the block on the grid of its tokens."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the block returns, its tokens marked with their grid."""
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        tokens = None if torch.compiler.is_compiling() else next(tensors, None)
        if tokens is None:  # also where torch.fx traces the model
            return super().forward(*args, **kwargs)
        source: MeasuredGrid = vars(self)[SOURCE]
        now = source.current_pass()
        storage, version = _storage_of(tokens)
        grid, marked = getattr(storage, _MARK, (None, None))
        if grid is None or marked != version:
            grid = source.of_new_tokens(tokens, now)
            if storage is not None:
                setattr(storage, _MARK, (grid, version))
        outer, now.block = now.block, grid
        try:
            output = super().forward(*args, **kwargs)
        finally:
            now.block = outer
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


def _is_repeated() -> bool:
    """Tells whether a backward pass is under way, in which only repeated modules run forward."""
    return torch._C._current_graph_task_id() != -1


def _is_same(one: InputGrid, other: InputGrid) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return one == other
    return one is other


def _storage_of(tokens: Tensor) -> tuple[Any, int | None]:
    """Returns the storage of tokens and how often they were written to.

    Tensors of inference mode do not count that; those in a transform of torch.func have no storage.
    """
    try:
        storage = tokens.untyped_storage()
    except NotImplementedError:
        return None, None
    return storage, None if tokens.is_inference() else tokens._version
