"""The encodings in a list: what each is in one line, and what it adds to DeiT-S."""

import math
from dataclasses import dataclass

from irpe.core.buckets import bucket_maps
from irpe.core.encodings import NAMES, parse_encoding
from irpe.core.encodings.model_only import CPVT, NoEncoding
from irpe.core.encodings.protocol import HeadSize
from irpe.core.grid import Grid

LINES = {
    "product-contextual-k": "iRPE, the paper's recommendation: a vector per 2-D offset, for keys",
    "product-contextual-qk": "the same for queries and keys",
    "product-contextual-qkv": "the same for queries, keys and values: the paper's best",
    "product-bias-k": "a scalar per 2-D offset in place of a vector",
    "cross-contextual-k": "a vector per row offset plus one per column offset; reaches far",
    "euclidean-contextual-k": "a vector per distance, whatever the direction",
    "quantization-contextual-k": "as euclidean, near distances finely ranked",
    "shaw": "offsets clipped to 3: Shaw et al., for sentences, on images",
    "huang": "as shaw, one table for queries and keys",
    "sasa": "half a head per axis, every offset: stand-alone self-attention",
    "transformer-xl": "projected sines of the offset, any grid",
    "axial-deeplab": "vectors per axis for q, k and v, zero beyond 3",
    "cpvt": "a 3 x 3 convolution between blocks, in place of the absolute encoding",
    "rope-axial": "rotary: EVA-02, DINOv3 (+normalized); nothing to learn",
    "rope-mixed": "rotary with learned frequencies: RoPE-ViT",
    "decomposed": "a vector per offset of each axis, resized: ViTDet, SAM",
    "bias-table": "a scalar per offset and head: Swin, BEiT",
    "log-cpb": "a bias from a small network of log-spaced offsets: Swin v2",
    "alibi-2d": "a fixed penalty for distance; nothing to learn",
    "none": "no relative encoding",
}
_DEPTH, _SIZE, _GRID = 12, HeadSize(6, 64, 1, 2), Grid((14, 14))  # DeiT-S at 224 x 224
_DIM, _TOKENS = 384, 197
_CPVT_BLOCKS = 5


@dataclass(frozen=True)
class Listed:
    """One encoding, and what it adds to DeiT-S at 224 x 224 for one image."""

    encoding: str
    line: str  # what it is
    extra_parameters: int  # fewer if negative
    extra_macs: int
    keeps_output: bool  # whether a trained model returns the same when it has just been equipped


def catalogue() -> list[Listed]:
    """Returns all encodings: the paper's methods first, then those with a name of their own."""
    return [_describe(text) for text in (*[t for t in LINES if t not in NAMES], *NAMES)]


def _describe(text: str) -> Listed:
    encoding = parse_encoding(text)
    if isinstance(encoding, NoEncoding):
        return Listed(text, LINES[text], 0, 0, True)
    if isinstance(encoding, CPVT):
        parameters = _CPVT_BLOCKS * (9 + 1) * _DIM - _TOKENS * _DIM
        macs = _CPVT_BLOCKS * 9 * _DIM * _GRID.num_positions
        return Listed(text, LINES[text], parameters, macs, False)
    shapes = encoding.parameter_shapes(_SIZE).values()
    maps = bucket_maps(encoding, _GRID, _SIZE.num_prefix_tokens)
    rows = [min(bucket_map.num_used_buckets, _TOKENS) for bucket_map in maps]
    macs = encoding.extra_macs((1, _SIZE.num_heads, _TOKENS, _SIZE.head_dim), _GRID, rows)
    parameters = sum(math.prod(shape) for shape in shapes)
    return Listed(text, LINES[text], _DEPTH * parameters, _DEPTH * macs, encoding.keeps_output)
