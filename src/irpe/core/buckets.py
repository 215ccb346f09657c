"""Bucket maps: which row of the table each pair of tokens uses, the paper's I(i, j)."""

import copy
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor

from irpe.core.constants import built_once, traced_as_constant
from irpe.core.encodings import Encoding, attention_encoding
from irpe.core.grid import Grid
from irpe.core.index import Index
from irpe.core.methods import METHODS

_ROWS_ALIKE = 4  # for each distinct row of the grid: fewer are not worth a second kind of map
_ROWS_ALIKE_WITH_PREFIX = 8  # which takes one copy of all pairs more
_WIDTH = 16  # keys in a row
_PAIRS_AT_ONCE = 2**18  # bounds the 64-bit indices that exist while a map is made


@dataclass(frozen=True, eq=False)
class BucketMap:
    """The row of a table for every pair of tokens.

    Args:
        ids: The row for query i and key j at `ids[i, j]`.
        num_buckets: The rows of the table, used on this grid or not.
        groups: For maps that depend on one axis alone, which of its coordinates each token has:
            tokens of one group have equal rows and columns in `ids`.
        representatives: One token of each group.
        grid: The shape of the grid, if it is known; the tokens before it are prefix tokens.
        axis: For maps that depend on one axis alone, which.

    Attributes:
        num_used_buckets: How many rows are used on this grid: the k of the cost.
        used_rows: The rows that occur in `ids`, ascending: the set in Eq. 27.
        compact_ids: `ids` renumbered, so that they count the used rows alone.
        row_ids: Where few of the grid's rows differ in their keys' ids: for each query, the compact
            ids of prefix tokens and of the distinct rows.
        row_numbers: Then, for each query, which of the distinct rows each row of the grid is.
    """

    ids: Int[Tensor, "query key"]
    num_buckets: int
    groups: Int[Tensor, " tokens"] | None = field(default=None, repr=False)
    representatives: Int[Tensor, " groups"] | None = field(default=None, repr=False)
    grid: tuple[int, ...] | None = None
    axis: int | None = None
    num_used_buckets: int = field(init=False)
    used_rows: Int[Tensor, " used"] = field(init=False, repr=False)
    compact_ids: Int[Tensor, "query key"] = field(init=False, repr=False)
    row_ids: Int[Tensor, "query narrow"] | None = field(init=False, repr=False)
    row_numbers: Int[Tensor, "query row"] | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.ids.ndim != 2 or self.ids.is_floating_point() or self.ids.is_meta:
            raise ValueError(
                f"ids of shape {tuple(self.ids.shape)}, {self.ids.dtype} on {self.ids.device} are "
                "no bucket map: pass a matrix of integers that holds values"
            )
        if self.grid is not None:
            _check_grid(self.grid, self.ids)
        used_rows = _find_used_rows(self.ids, self.num_buckets)
        object.__setattr__(self, "num_used_buckets", len(used_rows))
        object.__setattr__(self, "used_rows", used_rows)
        object.__setattr__(self, "compact_ids", _renumber(self.ids, used_rows, self.num_buckets))
        rows = None, None
        if self.grid is not None and self.axis is None:
            rows = _distinct_rows(self.compact_ids, self.grid)
        object.__setattr__(self, "row_ids", rows[0])
        object.__setattr__(self, "row_numbers", rows[1])

    def to(self, device: torch.device | str) -> "BucketMap":
        """Returns the map on `device`."""
        moved = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                object.__setattr__(moved, name, value.to(device))
        return moved


def bucket_maps(
    spec: Encoding | str,
    grid: Grid | Sequence[int],
    num_prefix_tokens: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[BucketMap, ...]:
    """Returns the bucket maps of an encoding on a grid, one for each table.

    Every pair with a prefix token (class, distillation, register) in it uses the last row. Equal
    arguments get the same maps, so the layers of a model share them; do not write to them.

    Args:
        spec: The encoding, or its text.
        grid: The shape of the grid of patches.
        num_prefix_tokens: How many tokens stand before the patches.
        device: Where the maps are to be.
    """
    shape = grid.shape if isinstance(grid, Grid) else grid
    if isinstance(shape, Sequence):  # a traced size counts as the number that it is
        shape = tuple(size if isinstance(size, float) else operator.index(size) for size in shape)
    return _constant_maps(spec, shape, num_prefix_tokens, device)


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
    return _cached_maps(
        spec.method, spec.index_on(grid), grid, num_prefix_tokens, torch.device(device)
    )


@built_once(maxsize=16)
def _cached_maps(
    method: str, index: Index | None, grid: Grid, num_prefix_tokens: int, device: torch.device
) -> tuple[BucketMap, ...]:
    maps = _build_maps(method, index, grid, num_prefix_tokens)
    return tuple(bucket_map.to(device) for bucket_map in maps)


def _build_maps(
    method: str, index: Index | None, grid: Grid, num_prefix_tokens: int
) -> tuple[BucketMap, ...]:
    if index is None:  # every offset is told apart
        spans = grid.distinct_offsets().shape[:-1]
        rows = spans.numel()
        return (_build_map(torch.arange(rows).view(spans), rows, grid, num_prefix_tokens, None),)
    ids_by_offset = METHODS[method].ids(grid.distinct_offsets(), index)
    rows = METHODS[method].num_buckets(index.max_index, grid.ndim)
    axes = range(grid.ndim) if METHODS[method].by_axis else [None] * len(rows)
    return tuple(
        _build_map(ids, count, grid, num_prefix_tokens, axis)
        for ids, count, axis in zip(ids_by_offset, rows, axes, strict=True)
    )


def _build_map(
    ids_by_offset: Int[Tensor, "*spans"],
    rows: int,
    grid: Grid,
    num_prefix_tokens: int,
    axis: int | None,
) -> BucketMap:
    """Spreads the ids of the distinct offsets over all pairs and puts the prefix row around."""
    num_buckets = rows + (num_prefix_tokens > 0)
    dtype = torch.int16 if num_buckets <= torch.iinfo(torch.int16).max else torch.int32
    # In row-major order of the distinct offsets, the place of (position_i - position_j) is the
    # difference of a number of i's and a number of j's: both are inner products with the strides.
    spans = torch.tensor(ids_by_offset.shape)
    strides = torch.tensor([int(spans[axis + 1 :].prod()) for axis in range(grid.ndim)])
    place = (grid.coordinates() * strides).sum(-1)
    zero = int(((spans - 1) // 2 * strides).sum())
    flat_ids = ids_by_offset.flatten().to(dtype)

    first, size = num_prefix_tokens, num_prefix_tokens + grid.num_positions
    ids = torch.full((size, size), num_buckets - 1, dtype=dtype)
    step = max(1, _PAIRS_AT_ONCE // grid.num_positions)
    for start in range(0, grid.num_positions, step):
        queries = slice(start, start + step)
        block = flat_ids[place[queries, None] - place + zero]
        ids[first + start : first + start + len(block), first:] = block
    if axis is None:
        return BucketMap(ids, num_buckets, grid=grid.shape)
    groups, representatives = _groups(grid, num_prefix_tokens, axis)
    return BucketMap(ids, num_buckets, groups, representatives, grid.shape, axis)


def _groups(grid: Grid, num_prefix_tokens: int, axis: int) -> tuple[Tensor, Tensor]:
    """Returns each token's coordinate on an axis, prefix tokens counting as one beyond the last."""
    size = grid.shape[axis]
    groups = torch.full((num_prefix_tokens + grid.num_positions,), size)
    groups[num_prefix_tokens:] = grid.coordinates()[:, axis]
    stride = math.prod(grid.shape[axis + 1 :])
    representatives = num_prefix_tokens + torch.arange(size) * stride
    if num_prefix_tokens:
        representatives = torch.cat([representatives, torch.zeros(1, dtype=torch.long)])
    return groups, representatives


def _find_used_rows(ids: Tensor, num_buckets: int) -> Tensor:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < num_buckets:
        raise ValueError(
            f"ids run from {int(ids.min())} to {int(ids.max())}, but the table has {num_buckets} "
            f"rows: they must lie in 0 to {num_buckets - 1}"
        )
    is_used = torch.zeros(num_buckets, dtype=torch.bool, device=ids.device)
    for part in _parts(ids):
        is_used[part.long()] = True
    return is_used.nonzero().squeeze(1)


def _renumber(ids: Tensor, used_rows: Tensor, num_buckets: int) -> Tensor:
    if len(used_rows) == num_buckets:
        return ids
    number = torch.zeros(num_buckets, dtype=ids.dtype, device=ids.device)
    number[used_rows] = torch.arange(len(used_rows), dtype=ids.dtype, device=ids.device)
    return torch.cat([number[part.long()] for part in _parts(ids)]).view(ids.shape)


def _check_grid(grid: tuple[int, ...], ids: Tensor) -> None:
    if not grid or min(grid) < 1 or math.prod(grid) > ids.shape[1]:
        raise ValueError(
            f"grid {grid} does not fit ids of {ids.shape[1]} keys: pass sizes of at least 1 whose "
            "product is the number of keys, without prefix tokens"
        )


def _distinct_rows(ids: Tensor, grid: tuple[int, ...]) -> tuple[Tensor | None, Tensor | None]:
    """Returns the ids of each query's distinct rows and the number of each row, if they are few.

    Rows are compared with the one before: equal rows follow each other wherever buckets grow with
    the distance.
    """
    height, width = math.prod(grid[:-1]), grid[-1]
    first = ids.shape[1] - height * width
    alike = _ROWS_ALIKE_WITH_PREFIX if first else _ROWS_ALIKE
    if width < _WIDTH or height < alike:
        return None, None
    rows = ids[:, first:].unflatten(1, (height, width))
    numbers = torch.zeros(len(ids), height, dtype=torch.int32, device=ids.device)
    step = max(1, _PAIRS_AT_ONCE // ids.shape[1])
    for start in range(0, len(ids), step):
        part = rows[start : start + step]
        numbers[start : start + step, 1:] = (part[:, 1:] != part[:, :-1]).any(2).cumsum(1)
    count = int(numbers.max()) + 1
    if count * alike > height or width < 2 * count:
        return None, None
    wanted = torch.arange(count, dtype=torch.int32, device=ids.device).expand(len(ids), -1)
    firsts = torch.searchsorted(numbers, wanted.contiguous())
    firsts = firsts.clamp_(max=height - 1)  # a query with fewer distinct rows has some twice
    distinct = rows.take_along_dim(firsts.unsqueeze(2), 1).flatten(1)
    return torch.cat([ids[:, :first], distinct], dim=1), numbers


def _parts(ids: Tensor) -> Sequence[Tensor]:
    """Returns the ids in parts: an index takes 8 bytes an element while it is used."""
    return torch.split(ids.flatten(), _PAIRS_AT_ONCE)
