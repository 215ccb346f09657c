"""What keeps a model, or an attention in it, from being equipped; hosts add what they know."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from irpe.adapters.answer import is_answered
from irpe.adapters.equipped import is_equipped
from irpe.adapters.host import Site
from irpe.adapters.hosts import rows_of
from irpe.core.encodings import AnyEncoding
from irpe.core.encodings.transformer_xl import TransformerXL
from irpe.errors import UserError


def check_untouched(model: nn.Module) -> None:
    """Raises an error if a model was given to a library that would not know of tables made later.

    DistributedDataParallel and fully_shard would not synchronise them, PEFT would not save them.
    """
    modules = {type(module): name or "the model" for name, module in model.named_modules()}
    for kind, name in modules.items():
        bases = {base.__name__ for base in kind.__mro__}
        wrapper = bases & {"DistributedDataParallel", "FSDPModule", "FullyShardedDataParallel"}
        if wrapper:
            raise UserError(
                f"{name} is a {wrapper.pop()}, which would not synchronise the tables: equip the "
                "model first, then distribute it"
            )
        if kind.__module__.startswith("peft."):
            raise UserError(
                f"{name} is an adapter of PEFT ({kind.__name__}), which would not save the tables: "
                'equip the model first, then add adapters, with modules_to_save=["rpe"] to train '
                "tables"
            )


def check_sites(sites: Sequence[Site]) -> None:
    """Raises an error if an attention has an encoding already, or cannot have one."""
    equipped = [site.name for site in sites if is_equipped(site.attention)]
    if equipped:
        raise UserError(
            f"already equipped: {', '.join(equipped)}; irpe.unequip(model) takes it back; "
            "or choose other layers"
        )
    for site in sites:
        kind = type(site.attention)
        known = next(iter(rows_of(kind)))  # the class that has a row: its own, or one of its bases
        if kind.forward is not known.forward:
            raise UserError(
                f"{site.name} is a {kind.__qualname__} with a forward of its own, which the "
                "encoding would replace: leave it out with layers=, or "
                f"irpe.register_host({kind.__qualname__})"
            )
        _check_weights(site)
        if site.check is not None:
            site.check()
        if not is_answered(kind):
            raise UserError(
                f"{site.name} is a {kind.__qualname__}, which computes its softmax itself: make "
                'the model with attn_implementation="sdpa", or leave it out with layers='
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
    if not rotating or getattr(spec, "takes_rotation", False):
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
