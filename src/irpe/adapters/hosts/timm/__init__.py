"""timm: a file for each family of models, and how models are built again."""

from torch import nn

from irpe.adapters.hosts.timm import maps, naflex, pooled, sam, swin, tokens
from irpe.adapters.hosts.timm.building import build_model as build_model
from irpe.adapters.hosts.timm.building import describe_model as describe_model
from irpe.adapters.hosts.timm.refusals import REFUSED as REFUSED
from irpe.adapters.plan import Plan, Request

_FAMILIES = (tokens, sam, swin, maps, pooled, naflex)


def find_attentions(model: nn.Module, request: Request) -> Plan:
    """Returns the attentions of all timm transformers in a model, and what else changes."""
    found = Plan()
    for name, module in model.named_modules():
        for family in _FAMILIES:
            family.add_sites(found, name, module, request)
    return found
