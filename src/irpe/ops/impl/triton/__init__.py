"""Fused kernels for CUDA and ROCm devices: nothing of size (heads, n, n) exists in memory.

A program walks over tiles of queries x keys. What a pair needs from the tables is looked up by its
bucket id and starts the accumulator of the product of q and k; the backward pass computes the
weights again. Sums per table row are made without atomic operations, so every result has the same
bits in each run.

With TRITON_INTERPRET=1 in the environment, Triton's interpreter computes calls on the CPU, for
tests.
"""

import importlib.util
import os

import torch

from irpe.core.cached import traced_as_constant
from irpe.ops.call import AttentionCall
from irpe.ops.differentiable import define_operators, differentiable
from irpe.ops.impl.triton.buckets import bits_of_maps
from irpe.ops.impl.triton.operator import TritonPasses
from irpe.ops.shapes import Tokens

_PASSES = TritonPasses()
define_operators(_PASSES)
IS_DETERMINISTIC = True
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_DIMENSIONS = 128
_MOST_TOKENS = 2**15  # pairs are counted with 32 bits
_ROWS_IN_ANY_CASE = 256


def supports(call: AttentionCall) -> str | None:
    """Returns why the call cannot be computed here, or `None` if it can."""
    queries, dim, keys = *call.q.shape[2:], call.k.shape[2]
    missing = _what_is_missing(call.q.device.type, call.q.device.index)
    if missing is not None:
        return missing
    if call.q.dtype not in _DTYPES:
        return f"it takes float16, bfloat16 and float32, not {call.q.dtype}"
    if dim > _MOST_DIMENSIONS:
        return f"it takes head dimensions up to {_MOST_DIMENSIONS}, not {dim}"
    if max(queries, keys) > _MOST_TOKENS:
        return f"it takes up to {_MOST_TOKENS:,} tokens, not {max(queries, keys):,}"
    if _lacks_mask_gradient(call):
        return "it gives gradients to masks that have all queries and keys"
    used = [bucket_map.num_used_buckets for bucket_map in call.maps]
    if sum(used) > max(keys, _ROWS_IN_ANY_CASE):
        return f"{sum(used)} rows are in use for {keys} keys: it multiplies rows, not pairs"
    if len(used) * bits_of_maps(used) > 32:
        return f"the buckets of {len(used)} maps with {sum(used)} rows do not fit into 32 bits"
    return None


def attention(call: AttentionCall) -> Tokens:
    """Returns what the reference returns."""
    return differentiable(call, _PASSES, keeps=True)


def _lacks_mask_gradient(call: AttentionCall) -> bool:
    pairs = (call.q.shape[2], call.k.shape[2])
    return call.mask is not None and call.mask.requires_grad and call.mask.shape[2:] != pairs


@traced_as_constant
def _what_is_missing(device: str, index: int | None) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: it comes with PyTorch for CUDA and ROCm"
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    if device != "cuda":
        return f"it runs on CUDA and ROCm devices, not on {device}"
    if torch.cuda.is_available() and torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(index)
        if major < 8:
            return f"it needs compute capability 8.0, and this device has {major}.{minor}"
    return None
