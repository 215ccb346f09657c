"""One folder or file for each library whose models can be equipped; none imports another.

A host has functions `find_row(kind)`, which returns what is known of a class of attentions (`Row`),
and `find_attentions(model, call)`, which returns a `Plan`. Where its models can be built again from
what they know about themselves, it also has `describe_model(model)`, which returns arguments that
json can hold, or `None`, and `build_model(arguments)`. Classes of the user's own come first
(`registered`).
"""

import importlib
from functools import cache
from typing import Any

from torch import nn

from irpe.adapters.host import Row
from irpe.errors import UserError

# In this order: the first host that finds an attention takes the model.
HOSTS = {
    "timm": "irpe.adapters.hosts.timm",
    "transformers": "irpe.adapters.hosts.transformers",
    "torchvision": "irpe.adapters.hosts.torchvision",
    "torch": "irpe.adapters.hosts.torch_nn",
}
REGISTERED: dict[str, Any] = {}  # hosts of the user's own, by the full name of the attention class
SUPPORTED = {
    "timm": "timm's VisionTransformer with the stock attention (ViT, DeiT, DINOv2, ...), Eva "
    "(DINOv3, EVA-02, Perception Encoder, rope-vit), BEiT, VisionTransformerRelPos, "
    "VisionTransformerSAM, SwinTransformer, SwinTransformerV2, MaxViT, CoAtNet, VOLO, Twins, "
    "DaViT, GCViT, TinyViT, FastViT, Visformer, PVT v2, MultiScaleVit and NaFlexVit",
    "transformers": "transformers' ViT, DeiT, DINOv2 with and without registers, DINOv3, the "
    "vision towers of CLIP, SigLIP and SigLIP 2, BEiT, data2vec-vision, ViTMSN, ViTPose, "
    "Sapiens 2, YOLOS, AST, Swin and Swin v2 (of MaskFormer, Donut and Swin2SR too), SAM, ViTDet, "
    "ViTMAE, VideoMAE, Vivit, Segformer, GLPN, PVT and PVT v2, DETR, Conditional DETR, RT-DETR, "
    "D-FINE, RF-DETR and LW-DETR",
    "torchvision": "torchvision's VisionTransformer and SwinTransformer, versions 1 and 2",
    "torch": "torch.nn's MultiheadAttention, TransformerEncoderLayer and TransformerEncoder",
}


def row_of(kind: type[nn.Module]) -> Row:
    """Returns the row of a class of attentions, or of the first of its bases that has one."""
    return next(iter(rows_of(kind).values()))


@cache
def rows_of(kind: type[nn.Module]) -> dict[type[nn.Module], Row]:
    """Returns the rows of a class of attentions and of its bases, by class; there is one."""
    found: dict[type[nn.Module], Row] = {}
    for base in kind.__mro__:
        name, library = full_name(base), base.__module__.partition(".")[0]
        host = REGISTERED.get(name) or (host_named(library) if library in HOSTS else None)
        row = None if host is None else host.find_row(base)
        if row is not None:
            found[base] = row
    return found


def full_name(kind: type) -> str:
    """Returns the name of a class with that of its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def hosts_of(model: nn.Module) -> dict[str, Any]:
    """Returns the hosts that a model has modules of: the user's own by class, then by library."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    own = {name: host for name, host in REGISTERED.items() if host.attention in kinds}
    libraries = {kind.__module__.partition(".")[0] for kind in kinds}
    return own | {library: host_named(library) for library in HOSTS if library in libraries}


def host_named(name: str) -> Any:
    """Returns the host of a library, or one that the user registered."""
    if name in HOSTS:
        return importlib.import_module(HOSTS[name])
    if name not in REGISTERED:
        raise UserError(
            f"{name!r} is not a library ({', '.join(HOSTS)}) nor an attention class that is "
            "registered: import what calls irpe.register_host for it first, or pass model=plain"
        )
    return REGISTERED[name]
