"""What is to be equipped: the request, the attentions found in a model, and their checks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from irpe.adapters.changes import Change, Undo
from irpe.adapters.equipped import is_equipped
from irpe.adapters.grids import GridSource
from irpe.core.encodings import AnyEncoding, TransformerXL
from irpe.core.encodings.joined import WithTables
from irpe.errors import UserError


@dataclass(frozen=True)
class Request:
    """What `equip` was asked for, besides the encoding.

    Args:
        grid: The grid, or `None` to take it from the model.
        num_prefix_tokens: The tokens before the patches, or `None` to take it from the model.
        absolute: What to do with the absolute encoding: keep, none or sinusoid.
        builtin_bias: What to do with a relative encoding that the model has: keep, drop or convert.
        requires_absolute: Whether a model without an absolute encoding is refused where that is to
            be replaced. Not so for cpvt, which takes its place whether there is one or not.
        layers: The indices of the attentions to equip; `None` means all.
    """

    grid: tuple[int, ...] | None
    num_prefix_tokens: int | None
    absolute: str
    builtin_bias: str
    requires_absolute: bool = True
    layers: tuple[int, ...] | None = None


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
        changes: What else is to be changed in it.
        check: Raises an error if it cannot be equipped after all.
        block: The module around it whose output is the tokens of the grid, if there is one.
        block_dim: The dimension of these tokens.
        has_builtin_bias: Whether it has a relative encoding of its own, which can be dropped.
        is_decomposed: Whether that is a vector for each offset of each axis, which our tables can
            hold (`decomposed`).
        rotates: Whether it rotates queries and keys by their position (rotary encoding).
        drops_tokens: Whether its tokens may be a part of the grid.
    """

    name: str
    attention: nn.Module
    equipped_class: type[nn.Module]
    num_heads: int
    head_dim: int
    num_prefix_tokens: int
    grid: GridSource
    changes: Sequence[Change] = ()
    check: Callable[[], None] | None = None
    block: nn.Module | None = None
    block_dim: int = 0
    has_builtin_bias: bool = False
    is_decomposed: bool = False
    rotates: bool = False
    drops_tokens: bool = False


@dataclass
class Plan:
    """What a host found in a model.

    Args:
        sites: The attentions, counted from the input.
        changes: What else is to be changed in the model.
        record: Records, in the library's own way, how the model was equipped: takes a list that
            json can hold.
    """

    sites: list[Site] = field(default_factory=list[Site])
    changes: list[Change] = field(default_factory=list[Change])
    record: Callable[[list[dict[str, Any]]], Undo] | None = None


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


def check_sites(sites: Sequence[Site]) -> None:
    """Raises an error if an attention has an encoding already, or cannot have one."""
    equipped = [site.name for site in sites if is_equipped(site.attention)]
    if equipped:
        raise UserError(
            f"already equipped: {', '.join(equipped)}; irpe.unequip(model) takes it back; "
            "or choose other layers"
        )
    for site in sites:
        stock_class: Any = site.equipped_class.__base__
        check_instance(site.name, site.attention)
        if type(site.attention).forward is not stock_class.forward:
            raise UserError(
                f"{site.name} is a {type(site.attention).__qualname__} with a forward of its own, "
                "which the encoding would replace: leave it out with layers=, or call "
                "irpe.RelativePositionEncoding in it (docs/how-to/own-attention.md)"
            )
        _check_weights(site)
        if site.check is not None:
            site.check()


def check_instance(name: str, module: nn.Module) -> None:
    """Raises an error if a module has a forward beside that of its class, which would be called."""
    if "forward" in vars(module):
        raise UserError(
            f"{name} has a forward set on the instance, as hooks of Accelerate set it, so that the "
            "encoding would do nothing: equip the model first and add hooks afterwards "
            "(accelerate.hooks.remove_hook_from_module(model, recurse=True) removes them)"
        )


def check_untouched(model: nn.Module) -> None:
    """Raises an error if a model was given to a library that would not know of tables made later.

    DistributedDataParallel and fully_shard would not synchronise them, PEFT would not save them.
    """
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        wrapper = kinds & {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}
        if wrapper:
            raise UserError(
                f"{name or 'the model'} is a {wrapper.pop()}, which would not synchronise the "
                "tables: equip the model first, then distribute it"
            )
        if type(module).__module__.startswith("peft."):
            raise UserError(
                f"{name or 'the model'} is an adapter of PEFT ({type(module).__name__}), which "
                "would not save the tables: equip the model first, then add adapters, with "
                'modules_to_save=["rpe"] to train tables'
            )


def _check_weights(site: Site) -> None:
    """Raises an error if an attention has quantised projections: tables have no dtype to take."""
    for name, module in site.attention.named_modules():
        weight: Any = getattr(module, "weight", None)  # a method in modules of torch.ao.quantized
        is_real = isinstance(weight, Tensor) and weight.is_floating_point()
        if weight is not None and not is_real:
            kind = f"{type(module).__module__}.{type(module).__qualname__}"
            raise UserError(
                f"{site.name}.{name} is a {kind}, whose weights are quantised: equip the model "
                "first and quantise it afterwards, or leave it out with layers="
            )


def check_rotation(sites: Sequence[Site], spec: AnyEncoding) -> None:
    """Raises an error for an encoding that cannot stand beside a host's own rotary encoding."""
    rotating = [site.name for site in sites if site.rotates]
    if not rotating or isinstance(spec, WithTables):
        return
    does = (
        f"shifts the queries of a product that {rotating[0]} rotates"
        if isinstance(spec, TransformerXL)
        else f"rotates queries and keys, as {rotating[0]} does already"
    )
    raise UserError(
        f"encoding '{spec}' {does}: the model keeps its own rotation; choose an encoding with "
        "tables beside it, such as product-contextual-k"
    )


def check_grid(request: Request, own: Sequence[int]) -> None:
    """Raises an error if a grid was given for a model that takes images of another size alone.

    Args:
        request: What was asked for.
        own: The one grid that the model has.
    """
    if request.grid is not None and request.grid != tuple(own):
        raise UserError(
            f"grid {request.grid}: the model takes images of one size, whose grid is "
            f"{tuple(own)}; leave grid out, or create the model for the other size"
        )


def check_window(request: Request, has_absolute: bool, kind: str = "a Swin transformer") -> None:
    """Raises an error if a model with windows or maps was asked for something it cannot have.

    Args:
        request: What was asked for.
        has_absolute: Whether this kind of model may have an absolute encoding.
        kind: The kind of model, for the message.
    """
    if request.grid is not None or request.num_prefix_tokens:
        raise UserError(
            f"grid {request.grid}, num_prefix_tokens {request.num_prefix_tokens}: the attention of "
            f"{kind} works on windows or maps, whose grid it knows; leave both to the model"
        )
    if request.absolute == "sinusoid" and not has_absolute:
        raise UserError(
            f"absolute 'sinusoid': {kind} has no absolute encoding to replace; use 'keep' or 'none'"
        )
