"""The table row of every pair of tokens, as a value."""

import copy
from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Integer, Shaped
from torch import Tensor

from irpe.errors import UserError

_PAIRS_AT_ONCE = 2**18  # bounds the 64-bit indices that exist while a map is made
_MOST_INDEXED_PAIRS = 2**18  # up to so many, a map holds 64-bit ids of its pairs too: 2 MiB


class KeyAxis(NamedTuple):
    """The axis of a grid that alone decides a pair's bucket: the map of `cross` for that axis.

    Args:
        grid: The shape of the grid of the keys, which follows any prefix tokens.
        axis: The axis of it.
        of_queries: Whether queries and keys are the same tokens, so that this holds for both.
    """

    grid: tuple[int, ...]
    axis: int
    of_queries: bool


class BucketMap:
    """The table row of every pair of tokens.

    A map keeps the rows that occur and, for each pair, which of these it uses, in the smallest
    integer type that can count them. Do not write to its tensors: maps are shared.

    Args:
        ids: The table row for query i and key j at `ids[i, j]`; with a batch axis in front where
            the images of a batch differ.
        num_buckets: The number of table rows, used or not.

    Attributes:
        used_rows: The table rows that occur in `ids`, ascending: the set in Eq. 27.
        num_used_buckets: How many they are: the k of the cost.
        compact_ids: For every pair the position of its row in `used_rows`.
        index: The same in 64 bits, which lookups take, unless that is much memory.
        key_axis: The axis of a grid that alone decides the bucket, if there is one.

    Examples:
        >>> import irpe
        >>> (buckets,) = irpe.bucket_maps("product-contextual-k", grid=(2, 3))
        >>> buckets.num_buckets, buckets.ids.shape
        (49, torch.Size([6, 6]))
    """

    def __init__(self, ids: Integer[Tensor, "*batch query key"], num_buckets: int) -> None:
        if ids.ndim not in (2, 3) or not _is_integer(ids) or ids.is_meta:
            raise UserError(
                f"ids of shape {tuple(ids.shape)}, {ids.dtype} on {ids.device} are not a bucket "
                "map: pass integers that hold values, (query, key) or (batch, query, key)"
            )
        used_rows = _find_used_rows(ids, num_buckets)
        dtype = smallest_dtype(len(used_rows))
        position = torch.zeros(num_buckets, dtype=dtype, device=ids.device)
        position[used_rows] = torch.arange(len(used_rows), device=ids.device).to(dtype)
        parts = torch.split(ids.flatten(), _PAIRS_AT_ONCE)
        compact_ids = torch.cat([position[part.long()] for part in parts]).view(ids.shape)
        self._set(compact_ids, used_rows, num_buckets, None)

    @classmethod
    def from_compact(
        cls,
        compact_ids: Tensor,
        used_rows: Tensor,
        num_buckets: int,
        key_axis: KeyAxis | None = None,
    ) -> "BucketMap":
        """Returns a map of its attributes."""
        made = object.__new__(cls)
        made._set(compact_ids, used_rows, num_buckets, key_axis)
        return made

    @classmethod
    def of_rows_in_use(
        cls, compact_ids: Tensor, count: int, key_axis: KeyAxis | None
    ) -> "BucketMap":
        """Returns a map of tables that hold the rows in use alone."""
        rows = torch.arange(count, device=compact_ids.device)
        return cls.from_compact(compact_ids, rows, count, key_axis)

    def _set(
        self, compact_ids: Tensor, used_rows: Tensor, num_buckets: int, key_axis: KeyAxis | None
    ) -> None:
        self.compact_ids = compact_ids
        self.used_rows = used_rows
        self.num_used_buckets = len(used_rows)
        self.num_buckets = num_buckets
        self.key_axis = key_axis
        is_small = compact_ids.numel() <= _MOST_INDEXED_PAIRS
        self.index = compact_ids.long() if is_small else compact_ids

    @property
    def ids(self) -> Integer[Tensor, "*batch query key"]:
        """The table row of each pair, made anew from `used_rows` and `compact_ids`."""
        rows, shape = self.used_rows.int(), self.compact_ids.shape
        parts = torch.split(self.compact_ids.flatten(), _PAIRS_AT_ONCE)
        return torch.cat([rows[part.long()] for part in parts]).view(shape)

    def to(self, device: torch.device | str) -> "BucketMap":
        """Returns the map on `device`."""
        return self.with_tensors(lambda tensor: tensor.to(device))

    def with_tensors(self, change: Callable[[Tensor], Tensor]) -> "BucketMap":
        """Returns the map with each of its tensors changed: moved, or replaced by a fake one."""
        changed = copy.copy(self)
        changed.compact_ids, changed.used_rows = change(self.compact_ids), change(self.used_rows)
        changed.index = (
            changed.compact_ids if self.index is self.compact_ids else change(self.index)
        )
        return changed

    def __repr__(self) -> str:
        pairs = "x".join(map(str, self.compact_ids.shape))
        return f"BucketMap({pairs} pairs, {self.num_used_buckets} of {self.num_buckets} rows used)"


def _find_used_rows(ids: Tensor, num_buckets: int) -> Tensor:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_buckets:
        raise UserError(
            f"ids run from {int(ids.min())} to {int(ids.max())}, but the table has {num_buckets} "
            f"rows: they must lie in 0 to {num_buckets - 1}"
        )
    is_used = torch.zeros(num_buckets, dtype=torch.bool, device=ids.device)
    for part in torch.split(ids.flatten(), _PAIRS_AT_ONCE):
        is_used[part.long()] = True
    return is_used.nonzero().squeeze(1)


def smallest_dtype(count: int) -> torch.dtype:
    """Returns the smallest integer type for positions below `count`."""
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if count - 1 <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


def _is_integer(ids: Shaped[Tensor, "..."]) -> bool:
    return not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
