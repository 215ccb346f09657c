"""How many pairs are computed at once, by device, and what is kept of them."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from irpe.core.cached import is_fake
from irpe.ops.call import AttentionCall
from irpe.ops.shapes import Scores


class Slice(NamedTuple):
    """Some images, heads and queries, with all keys."""

    images: slice
    heads: slice
    queries: slice


ALL = Slice(slice(None), slice(None), slice(None))


class Bounds(NamedTuple):
    """How much a device computes at once, in pairs of tokens.

    Args:
        weights: The largest slice whose attention weights are made.
        mask: The largest slice that goes to PyTorch's own kernel as a mask.
        kept: Up to so many, weights are kept for the backward pass in any case.
    """

    weights: int
    mask: int
    kept: int = 2**22  # 16 MiB in float32


# On the CPU a slice and what is made of it stay in the cache of a core, so its size grows with the
# threads; elsewhere the bound is memory: 2**26 scores are 256 MiB in float32.
BOUNDS = {"cpu": Bounds(2**19, 2**21), "other": Bounds(2**26, 2**26)}
_FEWEST_QUERIES = 128  # of a slice as a mask: heads share the index of its pairs, 8 bytes for each
_PAIRS_DRAWN_AT_ONCE = 2**15  # part of what a seed means: other numbers drop other weights


def bounds_of(device: torch.device) -> Bounds:
    """Returns the bounds of a device."""
    return BOUNDS["cpu" if device.type == "cpu" else "other"]


def keeps_weights(call: AttentionCall) -> bool:
    """Tells whether the backward pass gets the attention weights.

    It does where they are no larger than the other activations that a transformer block keeps for
    its backward pass, about 16 times q, or small in any case.
    """
    return (
        call.k.shape[2] <= 16 * call.q.shape[3] or call.num_pairs <= bounds_of(call.q.device).kept
    )


def make_slices(call: AttentionCall, makes_weights: bool, per_pair: int = 1) -> list[Slice]:
    """Returns slices of whole images, or of queries of one image: all pairs, each once.

    Slices of the same queries follow each other.

    Args:
        call: The call.
        makes_weights: Whether attention weights are made.
        per_pair: How many elements each pair of a slice takes.
    """
    is_cpu = call.q.is_cpu
    bounds = BOUNDS["cpu" if is_cpu else "other"]
    most = bounds.weights if makes_weights else bounds.mask
    most *= torch.get_num_threads() if is_cpu else 1
    batch, heads, queries, _ = call.q.shape
    keys = call.k.shape[2]
    most //= per_pair
    if batch * heads * queries * keys <= most:
        return [ALL]
    images = _equal_parts(batch, most // (heads * queries * keys))
    fewest = queries if makes_weights else min(queries, _FEWEST_QUERIES)
    at_once = heads if images > 1 or per_pair > 1 else _equal_parts(heads, most // (fewest * keys))
    rows = _equal_parts(queries, most // (images * at_once * keys))
    return [
        Slice(of_batch, of_heads, of_queries)
        for of_queries in _slices(queries, rows)
        for of_batch in _slices(batch, images)
        for of_heads in _slices(heads, at_once)
    ]


def _slices(total: int, size: int) -> Iterator[slice]:
    for start in range(0, total, size):
        yield slice(start, min(total, start + size))


def _equal_parts(total: int, most: int) -> int:
    """Returns the size of parts of at most `most`, at least 1, that are as equal as can be."""
    return max(1, math.ceil(total / math.ceil(total / max(1, most))))


def part(x: Tensor, place: Slice) -> Tensor:
    """Returns a slice of something that each query has."""
    return x if place is ALL else x[place]


def part_of_keys(x: Tensor, place: Slice) -> Tensor:
    """Returns a slice of something that each key has: that of its images and heads."""
    return x if place is ALL else x[place.images, place.heads]


def parts(
    place: Slice, of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Returns the slices of what each query has, and of what each key has."""
    if place is ALL:
        return of_queries, of_keys
    heads = place[:2]
    return tuple(x[place] for x in of_queries), tuple(x[heads] for x in of_keys)


def part_of_mask(mask: Tensor, place: Slice) -> Tensor:
    """Returns a slice of a mask, which may be broadcast."""
    if place is ALL:
        return mask
    pairs = zip(mask.shape, place, strict=False)
    return mask[tuple(slice(None) if size == 1 else chosen for size, chosen in pairs)]


def drop(scores: Scores, call: AttentionCall, place: Slice) -> Scores:
    """Returns the scores of a slice after dropout.

    Whether a weight is dropped depends on the seed and on the place of its pair in the call: on no
    slice, so that it is the same in both passes whatever the number of threads.
    """
    assert call.seed is not None
    _, heads, queries, keys = (*call.q.shape[:3], call.k.shape[2])
    images, of_heads, of_queries = (
        range(*chosen.indices(size)) for chosen, size in zip(place, call.q.shape, strict=False)
    )
    is_kept = torch.empty_like(scores, memory_format=torch.contiguous_format)
    generator = torch.Generator(scores.device)
    seed, keep = 0 if is_fake(call.seed) else int(call.seed), 1.0 - call.dropout_p
    at_once = max(1, _PAIRS_DRAWN_AT_ONCE // keys)  # rows of pairs, one for each query
    drawn = scores.new_empty(at_once, keys)
    lines = is_kept.view(-1, len(of_queries), keys)
    firsts = [(image * heads + head) * queries for image in images for head in of_heads]
    if len(of_queries) == queries:  # the rows of all heads follow each other
        lines, firsts = lines.view(1, -1, keys), firsts[:1]
    for line, first in zip(lines, firsts, strict=True):
        start = first + of_queries.start
        stop = start + len(line)
        for unit in range(start // at_once, -(-stop // at_once)):
            drawn.bernoulli_(keep, generator=generator.manual_seed(seed + unit))
            low, high = max(start, unit * at_once), min(stop, (unit + 1) * at_once)
            line[low - start : high - start] = drawn[low - unit * at_once : high - unit * at_once]
    return is_kept.mul_(scores).mul_(1 / keep)
