"""Bucket maps: which row of the table each pair of tokens uses, the paper's I(i, j)."""

import copy
from collections.abc import Sequence
from decimal import Decimal

import torch
from jaxtyping import Integer, Shaped
from torch import Tensor

from irpe.core.constants import built_once, traced_as_constant
from irpe.core.encodings import Encoding, attention_encoding
from irpe.core.grid import Grid, grid_shape
from irpe.core.index import Index
from irpe.core.methods import METHODS

_MOST_PAIRS = 2**38  # 256 GiB: what no machine of today builds in reasonable time
_MOST_ROWS = 2**38  # of a table; far below where the arithmetic of rows would overflow
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

    Example:
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
            raise ValueError(
                f"ids of shape {tuple(ids.shape)}, {ids.dtype} on {ids.device} are not a bucket "
                "map: pass integers that hold values, (query, key) or (batch, query, key)"
            )
        used_rows = _find_used_rows(ids, num_buckets)
        dtype = _smallest_dtype(len(used_rows))
        position = torch.zeros(num_buckets, dtype=dtype, device=ids.device)
        position[used_rows] = torch.arange(len(used_rows), device=ids.device).to(dtype)
        parts = torch.split(ids.flatten(), _PAIRS_AT_ONCE)
        compact_ids = torch.cat([position[part.long()] for part in parts]).view(ids.shape)
        self._set(compact_ids, used_rows, num_buckets, grid)

    @classmethod
    def _from_compact(
        cls, compact_ids: Tensor, used_rows: Tensor, num_buckets: int, grid: Sequence[int] | None
    ) -> "BucketMap":
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
            raise ValueError(
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


def bucket_maps(
    spec: Encoding | str,
    grid: Grid | Sequence[int],
    num_prefix_tokens: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[BucketMap, ...]:
    """Returns the bucket maps of an encoding on a grid, one for each table; a rotation has none.

    Every pair with a prefix token (class, distillation, register) in it uses the last row. Equal
    arguments get the same maps, so the layers of a model share them; do not write to them.

    Args:
        spec: The encoding, or its text.
        grid: The shape of the grid of patches.
        num_prefix_tokens: How many tokens stand before the patches.
        device: Where the maps are to be.

    Example:
        >>> import irpe
        >>> rows, columns = irpe.bucket_maps("cross-contextual-k", (14, 14), num_prefix_tokens=1)
        >>> rows.ids.shape
        torch.Size([197, 197])
    """
    return _constant_maps(spec, grid_shape(grid), num_prefix_tokens, device)


def check_num_prefix_tokens(count: int) -> None:
    """Raises an error unless `count` is a number of tokens."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(
            f"num_prefix_tokens = {count!r} must be an integer of 0 or more: the tokens that stand "
            "before the patches"
        )


@traced_as_constant
def _constant_maps(
    spec: Encoding | str,
    shape: Sequence[int],
    num_prefix_tokens: int,
    device: torch.device | str,
) -> tuple[BucketMap, ...]:
    check_num_prefix_tokens(num_prefix_tokens)
    spec, grid = attention_encoding(spec), Grid.of(shape)
    _check_size(grid, num_prefix_tokens)
    if spec.method is None:  # a rotation has no tables
        return ()
    index = spec.index_on(grid)
    if index is not None:
        _check_rows(spec, spec.method, index, grid)
    return _cached_maps(spec.method, index, grid, num_prefix_tokens, torch.device(device))


@built_once(maxsize=16)
def _cached_maps(
    method: str, index: Index | None, grid: Grid, num_prefix_tokens: int, device: torch.device
) -> tuple[BucketMap, ...]:
    maps = _build_maps(method, index, grid, num_prefix_tokens)
    return tuple(bucket_map.to(device) for bucket_map in maps)


def _check_size(grid: Grid, num_prefix_tokens: int) -> None:
    """Raises an error for a map that no machine can hold."""
    pairs = (grid.num_positions + num_prefix_tokens) ** 2
    if pairs > _MOST_PAIRS:
        raise ValueError(
            f"grid {grid} has {grid.num_positions:,} positions: its bucket map would take at least "
            f"{pairs / 2**30:,.0f} GiB, a byte for each pair; use windows or a coarser grid"
        )


def _check_rows(spec: Encoding, method: str, index: Index, grid: Grid) -> None:
    """Raises an error for a table that no machine can hold."""
    rows = max(METHODS[method].num_buckets(index.max_index, grid.ndim))
    if rows > _MOST_ROWS:
        raise ValueError(
            f"encoding '{spec}' has {Decimal(rows):.3g} table rows: they would take at least "
            f"{Decimal(rows) / 2**28:.3g} GiB, 4 bytes each; choose a smaller index"
        )


def _build_maps(
    method: str, index: Index | None, grid: Grid, num_prefix_tokens: int
) -> tuple[BucketMap, ...]:
    if index is None:  # every offset has a row of its own
        spans = grid.distinct_offsets().shape[:-1]
        rows = spans.numel()
        return (_build_map(torch.arange(rows).view(spans), rows, grid, num_prefix_tokens),)
    ids_by_offset = METHODS[method].ids(grid.distinct_offsets(), index)
    rows = METHODS[method].num_buckets(index.max_index, grid.ndim)
    return tuple(
        _build_map(ids, count, grid, num_prefix_tokens)
        for ids, count in zip(ids_by_offset, rows, strict=True)
    )


def _build_map(
    ids_by_offset: Integer[Tensor, "*spans"], rows: int, grid: Grid, num_prefix_tokens: int
) -> BucketMap:
    """Spreads the ids of the distinct offsets over all pairs and puts the prefix row around."""
    used_rows, compact = ids_by_offset.unique(return_inverse=True)
    if num_prefix_tokens:
        used_rows = torch.cat([used_rows, torch.tensor([rows])])
    dtype = _smallest_dtype(len(used_rows))
    flat_ids = compact.flatten().to(dtype)
    # In row-major order of the distinct offsets, the index of (position_i - position_j) is the
    # difference of two inner products with the strides, one of i's position and one of j's.
    spans = torch.tensor(ids_by_offset.shape)
    strides = torch.tensor([int(spans[axis + 1 :].prod()) for axis in range(grid.ndim)])
    place = (grid.coordinates() * strides).sum(-1)
    zero = int(((spans - 1) // 2 * strides).sum())

    first, size = num_prefix_tokens, num_prefix_tokens + grid.num_positions
    ids = torch.full((size, size), len(used_rows) - 1, dtype=dtype)
    step = max(1, _PAIRS_AT_ONCE // grid.num_positions)
    for start in range(0, grid.num_positions, step):
        block = flat_ids[place[start : start + step, None] - place + zero]
        ids[first + start : first + start + len(block), first:] = block
    num_buckets = rows + (num_prefix_tokens > 0)
    return BucketMap._from_compact(ids, used_rows, num_buckets, grid.shape)


def _find_used_rows(ids: Tensor, num_buckets: int) -> Tensor:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_buckets:
        raise ValueError(
            f"ids run from {int(ids.min())} to {int(ids.max())}, but the table has {num_buckets} "
            f"rows: they must lie in 0 to {num_buckets - 1}"
        )
    is_used = torch.zeros(num_buckets, dtype=torch.bool, device=ids.device)
    for part in torch.split(ids.flatten(), _PAIRS_AT_ONCE):
        is_used[part.long()] = True
    return is_used.nonzero().squeeze(1)


def _smallest_dtype(count: int) -> torch.dtype:
    """Returns the smallest integer type for positions below `count`."""
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if count - 1 <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


def _is_integer(ids: Shaped[Tensor, "..."]) -> bool:
    return not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
