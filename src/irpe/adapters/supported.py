"""Whether a model can be equipped, and why not if not."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from irpe.adapters.checks import check_sites
from irpe.adapters.equip import find_attentions
from irpe.adapters.equipped import Equipment
from irpe.adapters.hosts import full_name
from irpe.core.encodings.model_only import NoEncoding
from irpe.core.grid import Grid
from irpe.errors import UserTypeError


@dataclass(frozen=True)
class Support:
    """Whether a model can be equipped: true or false in an `if`, a sentence when printed.

    Args:
        attentions: The names of the attentions that would get an encoding; none if it cannot be.
        reason: What they are, or why the model cannot be equipped.
    """

    attentions: tuple[str, ...]
    reason: str

    def __bool__(self) -> bool:
        return bool(self.attentions)

    def __str__(self) -> str:
        return self.reason


def supported(model: nn.Module, grid: Sequence[int] | None = None) -> Support:
    """Returns whether `irpe.equip` takes a model, and why not if not. The model stays as it is.

    Args:
        model: The model.
        grid: As in `irpe.equip`, for models that do not know their own.

    Examples:
        >>> import irpe, timm
        >>> print(irpe.supported(timm.create_model("vit_tiny_patch16_224")))
        VisionTransformer can be equipped: 12 x timm.layers.attention.Attention
    """
    if not isinstance(model, nn.Module):
        raise UserTypeError(f"model is a {type(model).__qualname__}, not a torch.nn.Module")
    shape = None if grid is None else Grid.of(grid).shape
    try:
        call = Equipment(NoEncoding(), shape, None, None, "keep", "keep")
        plan = find_attentions(model, call)
        check_sites(plan.sites)
    except ValueError as error:
        return Support((), str(error))
    kinds = Counter(full_name(type(site.attention)) for site in plan.sites)
    found = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    notes = ""
    if any(site.rotates for site in plan.sites):
        notes += "; they rotate queries and keys, tables meet them before that"
    if any(site.has_builtin_bias for site in plan.sites):
        notes += "; they have a relative encoding of their own (builtin_bias=)"
    reason = f"{type(model).__qualname__} can be equipped: {found}{notes}"
    return Support(tuple(site.name for site in plan.sites), reason)
