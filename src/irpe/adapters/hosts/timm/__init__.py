"""timm: rows for its attentions, its models, and how these are built again."""

from functools import cache, partial
from typing import Any

from torch import nn

from irpe.adapters.equipped import Equipment
from irpe.adapters.host import Plan, Row, Site, change_absolute, check_window, measured, site_of
from irpe.adapters.hosts import full_name
from irpe.adapters.hosts.timm import sizes as sizes
from irpe.adapters.hosts.timm.building import build_model as build_model
from irpe.adapters.hosts.timm.building import describe_model as describe_model
from irpe.adapters.hosts.timm.families import ON_TOKENS, WITH_ABSOLUTE
from irpe.adapters.hosts.timm.rows import ROWS, size_of


def find_attentions(model: nn.Module, call: Equipment) -> Plan:
    """Returns the attentions of all timm transformers in a model, and what else changes."""
    found = Plan()
    for name, module in model.named_modules():
        add, grid_of, row = _known(type(module))
        if add is not None:
            add(found, name, module, call)
        if grid_of is not None and module.pos_embed is not None:
            change_absolute(found, module, "pos_embed", grid_of(module), call.absolute)
        if row is not None:
            found.sites.append(_site_on_map(found, name, module, row, call))
    return found


@cache
def _known(kind: type[nn.Module]) -> tuple[Any, Any, Row | None]:
    """Returns what adds a model's attentions, the grid of what it adds to tokens, or a row."""
    add, grid_of = (
        next((table[base] for base in kind.__mro__ if base in table), None)
        for table in (ON_TOKENS, WITH_ABSOLUTE)
    )
    row = next((ROWS[name] for name in map(full_name, kind.__mro__) if name in ROWS), None)
    return add, grid_of, None if row is None or row.grid is measured else row


def _site_on_map(found: Plan, name: str, attention: Any, row: Row, call: Equipment) -> Site:
    kind = type(attention).__qualname__
    return site_of(
        name,
        attention,
        row,
        call,
        *size_of(attention),
        int(getattr(attention, "has_cls_token", False)),
        rotates=getattr(attention, "rope", None) is not None,
        check=partial(check_window, call, kind, found),
    )


def find_row(kind: type) -> Row | None:
    """Returns what is known of a class of attentions."""
    return ROWS.get(full_name(kind))
