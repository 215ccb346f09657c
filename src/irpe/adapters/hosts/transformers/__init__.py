"""transformers: a file for each family of models, and how models are built again."""

from functools import partial

import transformers
from torch import nn
from transformers import PreTrainedModel

from irpe.adapters.equipped import Equipment
from irpe.adapters.host import Plan, Row, change_absolute, check_window
from irpe.adapters.hosts.transformers import sizes as sizes
from irpe.adapters.hosts.transformers.building import build_model as build_model
from irpe.adapters.hosts.transformers.building import describe_model as describe_model
from irpe.adapters.hosts.transformers.building import read_config as read_config
from irpe.adapters.hosts.transformers.building import read_tensors as read_tensors
from irpe.adapters.hosts.transformers.building import write_config
from irpe.adapters.refusals import check_refused

try:
    from irpe.adapters.hosts.transformers import detr, masked, pooled, sam, swin, vit
    from irpe.adapters.hosts.transformers.attention_interface import REGISTERED, make_site
    from irpe.adapters.hosts.transformers.classes import entry_of
except ImportError as error:
    raise ImportError(
        f"transformers {transformers.__version__} has other attentions than irpe knows: "
        "pip install -U 'irpe[transformers]'"
    ) from error

_ON_MAPS = {**swin.ROWS, **sam.ROWS, **pooled.ROWS}  # each call is given a map, or windows of one
_ROWS = {**_ON_MAPS, **pooled.ROWS_OF_PVT, **vit.ROWS}
_ABSOLUTE = {**swin.ABSOLUTE, **sam.ABSOLUTE}  # by the class of its owner: its name and its grid
_FAMILIES = (vit, detr, masked, pooled)  # whose models know more than their attentions


def find_attentions(model: nn.Module, call: Equipment) -> Plan:
    """Returns the attentions of all supported transformers in a model, and what else changes."""
    found = Plan()
    for name, module in model.named_modules():
        row, absolute = entry_of(module, _ON_MAPS), entry_of(module, _ABSOLUTE)
        if absolute is not None and getattr(module, absolute[0]) is not None:
            change_absolute(found, module, absolute[0], absolute[1](module), call.absolute)
        if row is not None:
            check = partial(check_window, call, type(module).__name__, found)
            found.sites.append(make_site(name, module, 0, call, row, check=check))
        for family in _FAMILIES:
            family.add_sites(found, name, module, call)
    if not found.sites:
        check_refused(model)
    if isinstance(model, PreTrainedModel):
        found.record = partial(write_config, model)
    return found


def find_row(kind: type) -> Row | None:
    """Returns what is known of a class of attentions; most fetch ours from the registry."""
    return (
        _ROWS.get(kind.__name__, REGISTERED)
        if kind.__module__.startswith("transformers.")
        else None
    )
