"""What a host is to `equip`: rows about classes of attentions, and what is found in a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn

from irpe.adapters.equipped import Equipment
from irpe.adapters.grids import LAST, SOURCE, InputGrid
from irpe.adapters.offset_vectors import convert_decomposed
from irpe.adapters.swaps import Swap, put_absolute, put_module, put_zeros, set_attribute
from irpe.errors import UserError
from irpe.nn.tables import RelativePositionEncoding


def measured(attention: nn.Module, *args: Any, **kwargs: Any) -> InputGrid:
    """Returns the grid of an attention whose model measures it; its first tensor is the tokens."""
    return vars(attention)[SOURCE].of_attention(args[0] if args else _first_tensor(**kwargs))


def _first_tensor(*args: Any, **kwargs: Any) -> Tensor:
    return next(x for x in (*args, *kwargs.values()) if isinstance(x, Tensor))


@dataclass(frozen=True)
class Own:
    """A grid that an attention has as an attribute, such as the size of its window."""

    name: str

    def __call__(self, attention: nn.Module, *args: Any, **kwargs: Any) -> tuple[int, ...]:
        """Returns the grid."""
        size: Any = getattr(attention, self.name)
        return (size, size) if isinstance(size, int) else tuple(size)


@dataclass(frozen=True)
class Given:
    """A grid that an attention is given: the shape of a map, from `start` to `end`."""

    start: int
    end: int | None = None

    def __call__(self, attention: nn.Module, *args: Any, **kwargs: Any) -> InputGrid:
        """Returns the grid."""
        return tuple(_first_tensor(*args, **kwargs).shape[self.start : self.end])


@dataclass(frozen=True)
class Row:
    """What is known of a class of attentions, besides that it is one.

    Args:
        grid: Returns the grid of a call, with the arguments of the call: `measured` by the model
            around it, its `Own`, `Given`, or another function.
        forward: A forward of ours, which calls `answer`, where the host computes softmax itself;
            `None` runs its own, in which the one call of attention is answered.
        rotates: The name by which its forward calls a rotation of queries and keys.
        rotates_pairs: Whether that is given both of them, not one at a time.
        call: The name by which its forward calls attention, if not by that of torch.
        bias: The slots of its own relative encoding, of tensors or of modules.
        no_bias: Makes what goes in the slot of a module when that is dropped, given the attention.
        off: Attributes that say that it has none, and what makes their values.
        is_decomposed: Whether that is a vector for each offset of each axis, which our tables can
            hold (`decomposed`).
        body: More members of the equipped class, by which its forward finds our function.
        first_grid: Returns the grid of the first input to an attention, if it is known.
    """

    grid: Callable[..., InputGrid] = measured
    forward: Callable[..., Any] | None = None
    rotates: str | None = None
    rotates_pairs: bool = False
    call: str | None = None
    bias: tuple[str, ...] = ()
    no_bias: Callable[[Any], nn.Module | None] = lambda _: None
    off: Mapping[str, Callable[[], object]] = field(default_factory=dict[str, Any])
    is_decomposed: bool = False
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])

    first_grid: Callable[[Any], tuple[int, ...] | None] | None = None

    def has_bias(self, attention: nn.Module) -> bool:
        """Returns whether an attention of the class has a relative encoding of its own."""
        slots = {**attention._modules, **attention._parameters}
        return any(slots.get(name) is not None for name in self.bias)

    def drop_bias(self, attention: nn.Module) -> list[Swap]:
        """Returns what drops the relative encoding of an attention's own."""
        modules = [name for name in self.bias if name in attention._modules]
        swaps = put_zeros(attention, [name for name in self.bias if name not in modules])
        for name in modules:
            swaps += put_module(attention, name, self.no_bias(attention))
        for name, make in self.off.items():
            swaps += set_attribute(attention, name, make())
        return swaps


@dataclass(frozen=True)
class Site:
    """An attention that can be equipped.

    Args:
        name: Its path in the model.
        attention: The attention itself.
        num_heads: The number of heads.
        head_dim: The dimension of one head.
        num_prefix_tokens: How many tokens stand before the patches.
        ndim: The number of axes of the grid.
        changes: What else is to be changed in it.
        prepare: What is done with the new encoding before it is put in, such as filling its tables.
        check: Raises an error if it cannot be equipped after all.
        block: The module around it whose output is the tokens of the grid, if there is one.
        block_dim: The dimension of these tokens.
        has_builtin_bias: Whether it has a relative encoding of its own, which can be dropped.
        is_decomposed: As in `Row`.
        rotates: Whether it rotates queries and keys by their position (rotary encoding).
        drops_tokens: Whether its tokens may be a part of the grid.
    """

    name: str
    attention: nn.Module
    num_heads: int
    head_dim: int
    num_prefix_tokens: int = 0
    ndim: int = 2
    changes: Sequence[Swap] = ()
    prepare: Sequence[Callable[[RelativePositionEncoding], None]] = ()
    check: Callable[[], None] | None = None
    block: nn.Module | None = None
    block_dim: int = 0
    has_builtin_bias: bool = False
    is_decomposed: bool = False
    rotates: bool = False
    drops_tokens: bool = False


@dataclass
class Plan:
    """What a host found in a model; the model is as it was.

    Args:
        sites: The attentions, counted from the input.
        changes: What else is to be changed in the model.
        replaces_absolute: Whether these replace an absolute encoding.
        record: Returns what records, in the library's own way, how the model was equipped, given a
            list that json can hold.
    """

    sites: list[Site] = field(default_factory=list[Site])
    changes: list[Swap] = field(default_factory=list[Swap])
    replaces_absolute: bool = False
    record: Callable[[list[dict[str, Any]]], list[Swap]] | None = None


def site_of(
    name: str, attention: nn.Module, row: Row, call: Equipment, *size: int, **facts: Any
) -> Site:
    """Returns an attention with what its row says of its own relative encoding.

    `size` is the number of heads, the dimension of one and the number of tokens before the patches.
    """
    has_bias = row.has_bias(attention)
    changes = [*facts.pop("changes", ())]
    first = row.grid if isinstance(row.grid, Own) else row.first_grid
    changes += set_attribute(attention, LAST, None if first is None else first(attention))
    if has_bias and call.builtin_bias != "keep":
        changes += row.drop_bias(attention)
    is_decomposed = has_bias and row.is_decomposed
    if is_decomposed and call.builtin_bias == "convert":
        convert = partial(convert_decomposed, attention, row.bias)
        facts["prepare"] = (*facts.get("prepare", ()), convert)
    facts["has_builtin_bias"] = facts.get("has_builtin_bias", False) or has_bias
    return Site(name, attention, *size, changes=changes, is_decomposed=is_decomposed, **facts)


def change_absolute(
    found: Plan, owner: nn.Module, name: str, grid: Sequence[int], absolute: str
) -> None:
    """Adds what replaces an absolute encoding to a plan; arguments as in `put_absolute`."""
    if absolute != "keep":
        found.changes += put_absolute(owner, name, grid, absolute)
        found.replaces_absolute = True


def choose_layers(sites: Sequence[Site], layers: Sequence[int] | None) -> list[Site]:
    """Returns the attentions with these indices, counted from the input; all if `None`."""
    if layers is None:
        return list(sites)
    valid = range(-len(sites), len(sites))
    wrong = [i for i in layers if isinstance(i, bool) or not isinstance(i, int) or i not in valid]
    if wrong or not layers:
        raise UserError(
            f"layers {wrong or layers} are not attentions of the model: give indices from 0 to "
            f"{len(sites) - 1}, or None for all"
        )
    indices = sorted({i % len(sites) for i in layers})
    return [sites[i] for i in indices]


_REMEDIES = {"grid": "leave grid out", "num_prefix_tokens": "leave it to the model"}


def refuse(call: Equipment, reasons: Mapping[str, str], **allowed: object) -> None:
    """Raises an error if a model was asked for something that it cannot have.

    Args:
        call: What was asked for.
        reasons: By the argument of `equip`, why it cannot be chosen.
        allowed: By the argument, what it may be all the same.
    """
    for name, reason in reasons.items():
        value = getattr(call, name)
        if value not in (None, "keep", allowed.get(name)):
            others = " or ".join(map(repr, ("keep", *filter(None, [allowed.get(name)]))))
            raise UserError(f"{name} {value!r}: {reason}; {_REMEDIES.get(name, f'use {others}')}")


def check_grid(call: Equipment, own: Sequence[int]) -> None:
    """Raises an error if a grid was given for a model that takes images of another size alone."""
    own = tuple(own)
    reason = f"the model takes images of one size, whose grid is {own}: create it for the other"
    refuse(call, {"grid": reason}, grid=own)


def check_window(call: Equipment, kind: str, found: Plan) -> None:
    """Raises an error if a model with windows or maps was asked for something it cannot have."""
    reason = f"{kind} works on windows or maps, whose grid it knows"
    refuse(call, {"grid": reason, "num_prefix_tokens": reason}, num_prefix_tokens=0)
    if not found.replaces_absolute:
        reason = f"the model around {kind} has no absolute encoding to replace"
        refuse(call, {"absolute": reason}, absolute="none")
