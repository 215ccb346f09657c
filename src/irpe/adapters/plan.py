"""How a model is equipped, whatever library it comes from: all of its attentions, or none.

An adapter finds the attentions of a model and describes each as a `Site`; `inject` gives each the
tables and the grid. An equipped attention is the same object with the same parameters, with a
submodule `rpe` and a class whose `forward` uses it, so names in checkpoints stay what they were.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from irpe.core.encodings import Encoding
from irpe.core.grid import Grid
from irpe.core.sinusoid import sinusoid
from irpe.nn.encoding import RelativePositionEncoding

Undo = Callable[[], object]
Change = Callable[[], Undo]  # makes a change and returns what undoes it


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


@dataclass(frozen=True)
class Request:
    """What `equip` was asked for, besides the encoding.

    Args:
        grid: The grid, or `None` to take it from the model.
        num_prefix_tokens: The tokens before the patches, or `None` to take it from the model.
        absolute: What becomes of the absolute encoding: keep, none or sinusoid; or "none if any",
            for an encoding that stands in its place whether there is one or not.
        builtin_bias: What becomes of a relative bias that the model has: keep or drop.
    """

    grid: tuple[int, ...] | None
    num_prefix_tokens: int | None
    absolute: str
    builtin_bias: str


@dataclass(frozen=True)
class Site:
    """An attention that can be equipped.

    Args:
        name: Its path in the model.
        attention: The attention itself.
        equipped_class: The class that it gets: a subclass of its own whose forward uses `self.rpe`.
        num_heads: The number of heads.
        head_dim: The dimension of one head.
        num_prefix_tokens: How many tokens stand before the patches.
        grid: Where the grid of an input comes from.
        change: What else is to be changed in it.
        check: Raises an error if it cannot be equipped after all.
        block: The module around it whose output is the tokens of the grid, if there is one.
        block_dim: The dimension of these tokens.
    """

    name: str
    attention: nn.Module
    equipped_class: type[nn.Module]
    num_heads: int
    head_dim: int
    num_prefix_tokens: int
    grid: GridSource
    change: Change | None = None
    check: Callable[[], None] | None = None
    block: nn.Module | None = None
    block_dim: int = 0


@dataclass
class Plan:
    """What an adapter found in a model.

    Args:
        sites: The attentions, counted from the input.
        changes: What else is to be changed in the model.
        record: Writes down, in the library's own way, how the model was equipped: takes a list
            that json can hold.
    """

    sites: list[Site] = field(default_factory=list[Site])
    changes: list[Change] = field(default_factory=list[Change])
    record: Callable[[list[dict[str, Any]]], Undo] | None = None


def inject(sites: Sequence[Site], changes: Sequence[Change], spec: Encoding) -> ExitStack:
    """Equips the attentions and makes the changes; undoes everything if anything fails.

    Returns:
        What undoes it all when it is closed.
    """
    # Tables made in inference mode could never be trained.
    with torch.inference_mode(False), ExitStack() as undo:
        encodings = [_make_encoding(site, spec) for site in sites]  # fails before any change
        for site, encoding in zip(sites, encodings, strict=True):
            undo.callback(_equip_one(site, encoding))
            if site.change is not None:
                undo.callback(site.change())
        for change in changes:
            undo.callback(change())
        return undo.pop_all()


def choose_layers(sites: Sequence[Site], layers: Sequence[int] | None) -> list[Site]:
    """Returns the attentions with these numbers, counted from the input; all if `None`."""
    if layers is None:
        return list(sites)
    known = range(-len(sites), len(sites))
    wrong = [n for n in layers if isinstance(n, bool) or not isinstance(n, int) or n not in known]
    if wrong or not layers:
        raise ValueError(
            f"layers {wrong or layers} name no attention: give numbers from 0 to {len(sites) - 1}, "
            "or None for all"
        )
    numbers = sorted({n % len(sites) for n in layers})
    return [sites[n] for n in numbers]


def check_sites(sites: Sequence[Site]) -> None:
    """Raises an error if an attention has an encoding already, or cannot have one."""
    equipped = [site.name for site in sites if is_equipped(site.attention)]
    if equipped:
        raise ValueError(
            f"already equipped: {', '.join(equipped)}; start from a plain model, or choose other "
            "layers"
        )
    for site in sites:
        stock_class: Any = site.equipped_class.__base__
        if type(site.attention).forward is not stock_class.forward:
            raise ValueError(
                f"{site.name} is a {type(site.attention).__qualname__} with a forward of its own, "
                "which the encoding would replace: leave it out with layers=, or call "
                "irpe.RelativePositionEncoding in it (docs/adapters.md)"
            )
        if site.check is not None:
            site.check()


def check_window(request: Request) -> None:
    """Raises an error if a Swin transformer was asked for what its windows decide."""
    if request.grid is not None or request.num_prefix_tokens:
        raise ValueError(
            f"grid {request.grid}, num_prefix_tokens {request.num_prefix_tokens}: the attention of "
            "a Swin transformer works on its windows; leave both to the model"
        )


def check_plain_window(request: Request) -> None:
    """The same for a Swin transformer that has no absolute encoding at all."""
    check_window(request)
    if request.absolute == "sinusoid":
        raise ValueError(
            "absolute 'sinusoid': a Swin transformer has no absolute encoding to replace; use "
            "'keep' or 'none'"
        )


def is_equipped(module: nn.Module) -> bool:
    """Tells whether a module is an attention with an encoding."""
    return isinstance(getattr(module, "rpe", None), RelativePositionEncoding)


def encoding_of(attention: nn.Module) -> RelativePositionEncoding:
    """Returns the encoding of an equipped attention."""
    encoding = attention.rpe
    assert isinstance(encoding, RelativePositionEncoding)
    return encoding


def grid_of(attention: nn.Module) -> GridSource:
    """Returns where an equipped attention takes its grid from."""
    source: object = attention.__dict__["rpe_grid"]
    assert isinstance(source, GridSource)
    return source


def _make_encoding(site: Site, spec: Encoding) -> RelativePositionEncoding:
    like = next(site.attention.parameters())
    ndim = 2 if site.grid.grid is None else Grid.of(site.grid.grid).ndim
    return RelativePositionEncoding(
        spec, site.num_heads, site.head_dim, site.num_prefix_tokens, ndim, like.device, like.dtype
    ).train(site.attention.training)


def _equip_one(site: Site, encoding: RelativePositionEncoding) -> Undo:
    attention, plain_class = site.attention, type(site.attention)
    attention.rpe = encoding
    attention.__dict__["rpe_grid"] = site.grid
    attention.__class__ = site.equipped_class

    def undo() -> None:
        attention.__class__ = plain_class
        del attention.rpe, attention.__dict__["rpe_grid"]

    return undo


def drop_parameter(module: nn.Module, name: str) -> Undo:
    """Takes a learned tensor away from a module, which then has `None` in its place."""
    learned = module._parameters[name]
    module._parameters[name] = None
    return partial(module._parameters.__setitem__, name, learned)


def put_absolute(module: nn.Module, name: str, grid: Sequence[int], absolute: str) -> Undo:
    """Puts zeros or sines in the place of an absolute encoding, whose last tokens are the grid.

    Args:
        module: Its owner.
        name: Its name there.
        grid: The shape of the grid.
        absolute: "none" or "sinusoid".
    """
    before: torch.Tensor = getattr(module, name)  # a parameter, or what was put in its place
    values = torch.zeros_like(before.detach())
    if absolute == "sinusoid":
        patches = sinusoid(grid, values.shape[-1])
        values[:, -len(patches) :] = patches.to(values)
    return replace_by_buffer(module, name, values)


def replace_by_buffer(module: nn.Module, name: str, values: torch.Tensor) -> Undo:
    """Puts fixed values where a module has a learned tensor; they are not saved with the model."""
    kinds: list[dict[str, Any]] = [module._parameters, module._buffers]
    before = [dict(kind) for kind in kinds]  # in their order, which optimizers go by
    was_saved = name not in module._non_persistent_buffers_set
    for kind in kinds:
        kind.pop(name, None)
    module.register_buffer(name, values, persistent=False)

    def undo() -> None:
        if was_saved:
            module._non_persistent_buffers_set.discard(name)
        for kind, items in zip(kinds, before, strict=True):
            kind.clear()
            kind.update(items)

    return undo
