"""Image relative position encodings for vision transformers.

From "Rethinking and Improving Relative Position Encoding for Vision Transformer" (ICCV 2021).

Importing the package loads nothing heavy: a name is loaded when it is first used, torch with it.
Code that needs the operators alone, to run an exported program for example, imports `irpe.ops`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irpe.adapters.equip import equip
    from irpe.adapters.parameter_groups import parameter_groups
    from irpe.adapters.saving import load_equipped, save_equipped
    from irpe.adapters.summary import summary
    from irpe.adapters.supported import supported
    from irpe.adapters.unequip import unequip
    from irpe.core.buckets import BucketMap, bucket_maps
    from irpe.core.encodings import parse_encoding
    from irpe.core.encodings.spec import RPESpec
    from irpe.core.grid import Grid
    from irpe.core.index import Clip, Piecewise
    from irpe.core.places import Points, PooledGrid, Subset
    from irpe.core.positions import Positions
    from irpe.models.published import load_published
    from irpe.nn.attention import RPEAttention
    from irpe.nn.cross_attention import RPECrossAttention
    from irpe.nn.encoding import RelativePositionEncoding
    from irpe.ops.attention import explain, rpe_attention, rpe_attention_weights, rpe_scores

__version__ = "0.1.0"

__all__ = [
    "BucketMap",
    "Clip",
    "Grid",
    "Piecewise",
    "Points",
    "PooledGrid",
    "Positions",
    "RPEAttention",
    "RPECrossAttention",
    "RPESpec",
    "RelativePositionEncoding",
    "Subset",
    "bucket_maps",
    "equip",
    "explain",
    "load_equipped",
    "load_published",
    "parameter_groups",
    "parse_encoding",
    "rpe_attention",
    "rpe_attention_weights",
    "rpe_scores",
    "save_equipped",
    "summary",
    "supported",
    "unequip",
]

_SOURCES = {
    "irpe.adapters.equip": ("equip",),
    "irpe.adapters.parameter_groups": ("parameter_groups",),
    "irpe.adapters.saving": ("load_equipped", "save_equipped"),
    "irpe.adapters.summary": ("summary",),
    "irpe.adapters.supported": ("supported",),
    "irpe.adapters.unequip": ("unequip",),
    "irpe.core.buckets": ("BucketMap", "bucket_maps"),
    "irpe.core.encodings": ("parse_encoding",),
    "irpe.core.encodings.spec": ("RPESpec",),
    "irpe.core.grid": ("Grid",),
    "irpe.core.index": ("Clip", "Piecewise"),
    "irpe.core.places": ("Points", "PooledGrid", "Subset"),
    "irpe.core.positions": ("Positions",),
    "irpe.models.published": ("load_published",),
    "irpe.nn.attention": ("RPEAttention",),
    "irpe.nn.cross_attention": ("RPECrossAttention",),
    "irpe.nn.encoding": ("RelativePositionEncoding",),
    "irpe.ops.attention": ("explain", "rpe_attention", "rpe_attention_weights", "rpe_scores"),
}
_MODULES = {name: module for module, names in _SOURCES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used."""
    if name not in _MODULES:
        raise AttributeError(f"module 'irpe' has no attribute {name!r}")
    importlib.import_module("irpe.ops")  # registers the operators and what they cost
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
