"""The paper's four methods: pure functions from offsets to bucket ids (Eq. 19-25).

An offset is query minus key, axes in (row, column) order along the last dimension, of which there
may be any number. A method returns a tuple of id tensors: one for each table it looks up.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from irpe.core.index import Index
from irpe.errors import UserTypeError

Offsets = Shaped[Tensor, "*pairs axes"]
Ids = Int[Tensor, "*pairs"]


def euclidean(offsets: Offsets, index: Index) -> tuple[Ids, ...]:
    """Undirected, Eq. 19-20: the index of the Euclidean distance."""
    return (index(_squared_distance(offsets.double()).sqrt()),)


def quantization(offsets: Offsets, index: Index) -> tuple[Ids, ...]:
    """Undirected, Eq. 21: the index of the distance's rank among all distances on the lattice.

    The rank counts the integers below the squared distance that are sums of squares, so it depends
    on the number of axes but not on the size of the grid.
    """
    if offsets.is_floating_point():
        raise UserTypeError(
            f"offsets of dtype {offsets.dtype} have no rank: method 'quantization' takes integer "
            "offsets; method 'euclidean' takes real ones"
        )
    # From the saturation distance on every rank has the same index: no longer table is needed.
    longest = min(math.ceil(index.saturation) ** 2, 2**62)
    squared = _squared_distance(offsets.long()).clamp(max=longest)
    largest = int(squared.max()) if squared.numel() else 0
    ranks = _ranks_of_sums_of_squares(largest, offsets.shape[-1])
    return (index(ranks[squared]),)


def cross(offsets: Offsets, index: Index) -> tuple[Ids, ...]:
    """Directed, Eq. 22-24: one index per axis, each into a table of its own; the rows are added."""
    return tuple(index(offset) + index.max_index for offset in offsets.unbind(-1))


def product(offsets: Offsets, index: Index) -> tuple[Ids, ...]:
    """Directed, Eq. 25: the indices of all axes jointly, row-major, into one table."""
    joint = torch.zeros(offsets.shape[:-1], dtype=torch.long, device=offsets.device)
    for axis_ids in cross(offsets, index):
        joint = joint * (2 * index.max_index + 1) + axis_ids
    return (joint,)


@dataclass(frozen=True)
class Method:
    """A method together with what the paper fixes about it.

    Args:
        ids: The function from offsets to bucket ids.
        num_buckets: From the largest index and the number of axes to the rows of each table.
        ratio: The ratio of the piecewise index with which the paper found the method best.
        by_axis: Whether there is a table for each axis that depends on this axis alone.
    """

    ids: Callable[[Tensor, Index], tuple[Tensor, ...]]
    num_buckets: Callable[[int, int], tuple[int, ...]]
    ratio: float
    by_axis: bool = False


METHODS = {
    "euclidean": Method(euclidean, lambda m, ndim: (m + 1,), 20.0),
    "quantization": Method(quantization, lambda m, ndim: (m + 1,), 29.0),
    "cross": Method(cross, lambda m, ndim: (2 * m + 1,) * ndim, 20.0, by_axis=True),
    "product": Method(product, lambda m, ndim: ((2 * m + 1) ** ndim,), 1.9),
}


def _squared_distance(offsets: Tensor) -> Tensor:
    return offsets.square().sum(-1)


def _ranks_of_sums_of_squares(largest: int, ndim: int) -> Int[Tensor, " integers"]:
    """Ranks the sums of `ndim` squares up to `largest`; entries that are none are meaningless."""
    is_sum = torch.zeros(largest + 1, dtype=torch.bool)
    is_sum[0] = True
    for _ in range(ndim):
        reached = torch.zeros_like(is_sum)
        for root in range(math.isqrt(largest) + 1):
            reached[root**2 :] |= is_sum[: largest + 1 - root**2]
        is_sum = reached
    return is_sum.long().cumsum(0) - 1
