"""Why a model cannot be equipped: what its attentions are, in a sentence."""

from torch import nn

from irpe.adapters.hosts import full_name, hosts_of

_MOST_KINDS = 3  # named in one sentence


def refusal_of(model: nn.Module) -> str:
    """Returns the error for a model in which no host found an attention."""
    reasons: dict[str, str] = {}
    for host in hosts_of(model).values():
        reasons |= getattr(host, "REFUSED", {})
    known: dict[str, str] = {}
    for module in model.modules():
        names = [full_name(kind) for kind in type(module).__mro__]
        known |= {name: reasons[name] for name in names[:-1] if name in reasons}
    kinds = {full_name(type(module)) for module in model.modules() if is_attention(module)}
    if known:
        found = "; ".join(f"{name} {reason}" for name, reason in sorted(known.items()))
    elif kinds:
        found = f"its attention is {_listed(sorted(kinds))}, which is not supported"
    else:
        found = "it has no self-attention"
    return (
        f"{type(model).__qualname__} cannot be equipped: {found}. Supported are the models that "
        "irpe models and docs/reference/supported-models.md list; docs/how-to/own-attention.md "
        "shows how to equip an attention of your own"
    )


def is_attention(module: nn.Module) -> bool:
    """Tells whether a module looks like a self-attention of another library's or the user's own."""
    name = type(module).__name__
    is_torch = type(module) is nn.MultiheadAttention  # one that no host offers is cross-attention
    return "Att" in name and "Pool" not in name and not is_torch


def _listed(kinds: list[str]) -> str:
    more = len(kinds) - _MOST_KINDS
    return ", ".join(kinds[:_MOST_KINDS]) + (f" and {more} more" if more > 0 else "")
