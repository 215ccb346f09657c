"""Image relative position encodings for vision transformers.

From "Rethinking and Improving Relative Position Encoding for Vision Transformer" (ICCV 2021).

Importing the package loads nothing heavy: a name is loaded when it is first used, torch with it.
Code that needs the operators alone, to run an exported program for example, imports `irpe.ops`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from irpe.lazy import lazy_names

if TYPE_CHECKING:
    from irpe.adapters.equip import equip, unequip
    from irpe.adapters.hosts.registered import register_host
    from irpe.adapters.parameter_groups import parameter_groups, scale_table_rates
    from irpe.adapters.resize import resize
    from irpe.adapters.saving import load_equipped, save_equipped
    from irpe.adapters.summary import summary
    from irpe.adapters.supported import supported
    from irpe.core.buckets import BucketMap, bucket_maps
    from irpe.core.encodings import parse_encoding
    from irpe.core.encodings.spec import RPESpec
    from irpe.core.grid import Grid, PooledGrid
    from irpe.core.index import Clip, Piecewise
    from irpe.core.positions import AugmentedGrid, Positions
    from irpe.core.token_sets import Points, Subset
    from irpe.errors import UserError
    from irpe.models.published import load_published
    from irpe.nn.attention import RPEAttention, RPECrossAttention
    from irpe.nn.tables import RelativePositionEncoding
    from irpe.ops.attention import explain, rpe_attention, rpe_attention_weights, rpe_scores
    from irpe.ops.choose import prepare
    from irpe.relative.make_relative import make_relative
    from irpe.relative.probe import position_probe
    from irpe.relative.recalibrate import recalibrate

    __version__: str

__all__ = [
    "AugmentedGrid",
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
    "UserError",
    "bucket_maps",
    "equip",
    "explain",
    "load_equipped",
    "load_published",
    "make_relative",
    "parameter_groups",
    "parse_encoding",
    "position_probe",
    "prepare",
    "recalibrate",
    "register_host",
    "resize",
    "rpe_attention",
    "rpe_attention_weights",
    "rpe_scores",
    "save_equipped",
    "scale_table_rates",
    "summary",
    "supported",
    "unequip",
]

_SOURCES = {
    "irpe.adapters.equip": ("equip", "unequip"),
    "irpe.adapters.hosts.registered": ("register_host",),
    "irpe.adapters.parameter_groups": ("parameter_groups", "scale_table_rates"),
    "irpe.adapters.resize": ("resize",),
    "irpe.adapters.saving": ("load_equipped", "save_equipped"),
    "irpe.adapters.summary": ("summary",),
    "irpe.adapters.supported": ("supported",),
    "irpe.core.buckets": ("BucketMap", "bucket_maps"),
    "irpe.core.encodings": ("parse_encoding",),
    "irpe.core.encodings.spec": ("RPESpec",),
    "irpe.core.index": ("Clip", "Piecewise"),
    "irpe.core.grid": ("Grid", "PooledGrid"),
    "irpe.core.positions": ("AugmentedGrid", "Positions"),
    "irpe.core.token_sets": ("Points", "Subset"),
    "irpe.errors": ("UserError",),
    "irpe.models.published": ("load_published",),
    "irpe.nn.attention": ("RPEAttention", "RPECrossAttention"),
    "irpe.nn.tables": ("RelativePositionEncoding",),
    "irpe.ops.attention": ("explain", "rpe_attention", "rpe_attention_weights", "rpe_scores"),
    "irpe.ops.choose": ("prepare",),
    "irpe.relative.make_relative": ("make_relative",),
    "irpe.relative.probe": ("position_probe",),
    "irpe.relative.recalibrate": ("recalibrate",),
}
_load, __dir__ = lazy_names("irpe", _SOURCES)


def __getattr__(name: str) -> Any:
    """Loads a public name when it is first used."""
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("irpe")
    return _load(name)
