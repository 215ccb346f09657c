"""How many pairs are computed at once, by device, and when attention weights are kept."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from irpe.ops.call import AttentionCall
from irpe.ops.differentiable import CompactCall
from irpe.ops.impl.blockwise.roles import uses_pairs
from irpe.ops.impl.blockwise.terms import Block


class Schedule(NamedTuple):
    """How much a device computes at once, in pairs of tokens.

    Args:
        weights: The largest block whose attention weights are made.
        mask: The largest block that goes to PyTorch's own kernel as a mask.
        kept: Up to so many, weights are kept for the backward pass in any case.
    """

    weights: int
    mask: int
    kept: int = 2**22  # 16 MiB in float32


# On the CPU a block and what is made of it stay in the cache of a core, so its size grows with the
# threads; elsewhere the bound is memory: 2**26 scores are 256 MiB in float32.
SCHEDULES = {"cpu": Schedule(2**19, 2**21), "other": Schedule(2**26, 2**26)}


def schedule_of(device: torch.device) -> Schedule:
    """Returns the schedule of a device."""
    return SCHEDULES["cpu" if device.type == "cpu" else "other"]


def keeps_weights(call: AttentionCall) -> bool:
    """Tells whether the backward pass gets the attention weights.

    It does where they are no larger than the other activations that a transformer block keeps for
    its backward pass, about 16 times q, or small in any case.
    """
    return (
        call.k.shape[2] <= 16 * call.q.shape[3] or call.num_pairs <= schedule_of(call.q.device).kept
    )


def make_blocks(call: CompactCall, makes_weights: bool) -> list[Block]:
    """Returns blocks of whole images, or of queries of one image: all pairs, each once.

    Blocks of the same queries follow each other.
    """
    schedule = schedule_of(call.q.device)
    most = schedule.weights if makes_weights else schedule.mask
    if call.q.device.type == "cpu":
        most *= torch.get_num_threads()
    batch, heads, queries, dim = call.q.shape
    keys, per_pair = call.k.shape[2], 1
    roles = (call.query_tables, call.key_tables, call.value_tables)
    for table, ids in (pair for role in roles for pair in zip(role, call.ids, strict=False)):
        if uses_pairs(table, ids):  # lays out a vector for each pair, for all images and heads
            per_pair = max(per_pair, table.shape[0] * dim // heads + 1)
    most //= per_pair
    images = _equal_parts(batch, most // (heads * queries * keys))
    at_once = heads if images > 1 or per_pair > 1 else _equal_parts(heads, most // (queries * keys))
    rows = _equal_parts(queries, most // (images * at_once * keys))
    return [
        Block(of_batch, of_heads, of_queries)
        for of_queries in _slices(queries, rows)
        for of_batch in _slices(batch, images)
        for of_heads in _slices(heads, at_once)
    ]


def _slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, max(total, 1), size):
        yield slice(start, start + size)


def _equal_parts(total: int, most: int) -> int:
    """Returns the size of parts of at most `most`, at least 1, that are as equal as can be."""
    return max(1, math.ceil(total / math.ceil(max(total, 1) / max(1, most))))
