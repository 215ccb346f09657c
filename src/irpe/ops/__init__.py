"""Attention with relative position encodings: one meaning, several ways to compute it.

Importing this package registers the library's operators with torch, so that programs which use them
can be loaded, and their formulas with torch's counter of operations.
"""

from irpe.ops.attention import rpe_attention as rpe_attention
from irpe.ops.flops import register_flop_formulas

register_flop_formulas()
