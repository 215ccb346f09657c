"""Image relative position encodings for vision transformers.

From "Rethinking and Improving Relative Position Encoding for Vision Transformer" (ICCV 2021).
"""

from typing import TYPE_CHECKING, Any

from irpe.adapters.equip import equip
from irpe.adapters.parameter_groups import parameter_groups
from irpe.adapters.saving import load_equipped, save_equipped
from irpe.adapters.summary import summary
from irpe.core.buckets import BucketMap, bucket_maps
from irpe.core.encodings import parse_encoding
from irpe.core.encodings.spec import RPESpec
from irpe.core.grid import Grid
from irpe.core.index import Clip, Piecewise
from irpe.nn.attention import RPEAttention
from irpe.nn.encoding import RelativePositionEncoding
from irpe.ops.attention import explain, rpe_attention, rpe_attention_weights, rpe_scores
from irpe.ops.flops import register_flop_formulas

if TYPE_CHECKING:
    from irpe.models.published import load_published as load_published

__version__ = "0.1.0"

__all__ = [
    "BucketMap",
    "Clip",
    "Grid",
    "Piecewise",
    "RPEAttention",
    "RPESpec",
    "RelativePositionEncoding",
    "bucket_maps",
    "equip",
    "explain",
    "load_equipped",
    "parameter_groups",
    "parse_encoding",
    "rpe_attention",
    "rpe_attention_weights",
    "rpe_scores",
    "save_equipped",
    "summary",
]

register_flop_formulas()


def __getattr__(name: str) -> Any:
    """Imports what needs timm when it is first asked for."""
    if name != "load_published":
        raise AttributeError(f"module 'irpe' has no attribute {name!r}")
    from irpe.models.published import load_published

    return load_published
