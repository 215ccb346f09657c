"""The table row of every pair of tokens, as a value."""

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Integer, Shaped
from torch import Tensor

from irpe.core.grid import Grid
from irpe.errors import UserError

_PAIRS_AT_ONCE = 2**18  # bounds the 64-bit indices that exist while a map is made


class BucketMap:
    """The table row of every pair of tokens.

    A map keeps the rows that occur and, for each pair, which of these it uses, in the smallest
    integer type that can count them. Do not write to its tensors: maps are shared.

    Args:
        ids: The table row for query i and key j at `ids[i, j]`; with a batch axis in front where
            the images of a batch differ.
        num_buckets: The number of table rows, used or not.
        grid: The grid of the keys if they lie on one, after any prefix tokens.

    Attributes:
        used_rows: The table rows that occur in `ids`, ascending: the set in Eq. 27.
        num_used_buckets: How many they are: the k of the cost.
        compact_ids: For each pair, the position of its row in `used_rows`.

    Examples:
        >>> import irpe
        >>> (buckets,) = irpe.bucket_maps("product-contextual-k", grid=(2, 3))
        >>> buckets.num_buckets, buckets.ids.shape
        (49, torch.Size([6, 6]))
    """

    def __init__(
        self,
        ids: Integer[Tensor, "*batch query key"],
        num_buckets: int,
        grid: Sequence[int] | None = None,
    ) -> None:
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
        self._set(compact_ids, used_rows, num_buckets, grid)

    @classmethod
    def from_compact(
        cls, compact_ids: Tensor, used_rows: Tensor, num_buckets: int, grid: Sequence[int] | None
    ) -> "BucketMap":
        """Returns a map of what it keeps: see the attributes."""
        made = object.__new__(cls)
        made._set(compact_ids, used_rows, num_buckets, grid)
        return made

    def _set(
        self, compact_ids: Tensor, used_rows: Tensor, num_buckets: int, grid: Sequence[int] | None
    ) -> None:
        self.compact_ids = compact_ids
        self.used_rows = used_rows
        self.num_used_buckets = len(used_rows)
        self.num_buckets = num_buckets
        self.grid = None if grid is None else Grid.of(grid).shape
        if self.grid is not None and Grid(self.grid).num_positions > compact_ids.shape[-1]:
            raise UserError(
                f"grid {self.grid} does not fit ids of {compact_ids.shape[-1]} keys: its positions "
                "and the prefix tokens before them are the keys"
            )

    @property
    def ids(self) -> Integer[Tensor, "*batch query key"]:
        """The table row of each pair, made anew from `used_rows` and `compact_ids`."""
        rows, shape = self.used_rows.int(), self.compact_ids.shape
        parts = torch.split(self.compact_ids.flatten(), _PAIRS_AT_ONCE)
        return torch.cat([rows[part.long()] for part in parts]).view(shape)

    def to(self, device: torch.device | str) -> "BucketMap":
        """Returns the map on `device`."""
        moved = copy.copy(self)
        moved.compact_ids = self.compact_ids.to(device)
        moved.used_rows = self.used_rows.to(device)
        return moved

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
