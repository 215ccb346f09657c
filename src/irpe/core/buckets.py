"""Bucket maps: which row of the table each pair of tokens uses, the paper's I(i, j)."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Integer
from torch import Tensor

from irpe.core.bucket_map import BucketMap, KeyAxis, smallest_dtype
from irpe.core.cached import cached_constant
from irpe.core.encodings import Encoding, attention_encoding
from irpe.core.grid import Grid, grid_shape
from irpe.core.index import Index
from irpe.core.methods import METHODS
from irpe.core.positions import Positions, positions_of
from irpe.core.token_sets import Points, Subset
from irpe.errors import UserError, check_is_holdable

_MOST_PREFIX_TOKENS = 2**16
_PAIRS_AT_ONCE = 2**18  # bounds the 64-bit indices that exist while a map is made


def bucket_maps(
    spec: Encoding | str,
    grid: Grid | Sequence[int] | Positions,
    num_prefix_tokens: int = 0,
    device: torch.device | str = "cpu",
) -> tuple[BucketMap, ...]:
    """Returns the bucket maps of an encoding on a grid, one for each table; a rotation has none.

    Every pair with a prefix token (class, distillation, register) in it uses the last row. Equal
    arguments get the same maps, so the layers of a model share them; do not write to them.

    Args:
        spec: The encoding, or its text.
        grid: The shape of the grid of patches; or positions, for tokens that are not one whole
            grid.
        num_prefix_tokens: How many tokens stand before the patches; positions have their own.
        device: Where the maps are to be.

    Examples:
        >>> import irpe
        >>> rows, columns = irpe.bucket_maps("cross-contextual-k", (14, 14), num_prefix_tokens=1)
        >>> rows.ids.shape
        torch.Size([197, 197])
    """
    if isinstance(grid, Positions):
        if num_prefix_tokens:
            raise UserError(
                f"num_prefix_tokens = {num_prefix_tokens}: positions have their own, "
                f"{grid.prefixes}; leave it out"
            )
        return _maps_at(attention_encoding(spec), grid, torch.device(device))
    check_num_prefix_tokens(num_prefix_tokens)
    return maps_on(spec, grid_shape(grid), num_prefix_tokens, device)


def check_num_prefix_tokens(count: int) -> None:
    """Raises an error unless `count` is a number of tokens."""
    is_count = isinstance(count, int) and not isinstance(count, bool)
    if not is_count or not 0 <= count <= _MOST_PREFIX_TOKENS:
        raise UserError(
            f"num_prefix_tokens = {count!r} must be an integer from 0 to {_MOST_PREFIX_TOKENS:,}: "
            "the tokens that stand before the patches"
        )


@cached_constant(maxsize=64)
def maps_on(
    spec: Encoding | str,
    shape: tuple[int, ...],
    num_prefix_tokens: int,
    device: torch.device | str,
) -> tuple[BucketMap, ...]:
    """Returns the maps on the grid of a shape; `bucket_maps` for checked arguments."""
    spec, grid = attention_encoding(spec), Grid.of(shape)
    tokens = grid.num_positions + num_prefix_tokens
    _check_pairs(tokens**2, str(grid))
    if spec.method is None:  # a rotation has no tables
        return ()
    index = spec.index_on(grid)
    if index is not None:
        _check_rows(spec, spec.method, index, grid.ndim)
    return _cached_maps(spec.method, index, grid, num_prefix_tokens, torch.device(device))


@cached_constant(maxsize=32)  # shared by encodings that differ in targets alone
def _cached_maps(
    method: str, index: Index | None, grid: Grid, num_prefix_tokens: int, device: torch.device
) -> tuple[BucketMap, ...]:
    maps = _build_maps(method, index, grid, num_prefix_tokens)
    return tuple(bucket_map.to(device) for bucket_map in maps)


def _maps_at(spec: Encoding, positions: Positions, device: torch.device) -> tuple[BucketMap, ...]:
    """Returns the maps at positions: made once for equal ones, or as long as their tensors live."""
    _check_positions(spec, positions)
    if spec.method is None:
        return ()
    if positions.constant is not None:
        return _constant_maps_at(spec, positions.constant, device)
    if torch.compiler.is_compiling():
        return _build_maps_at(spec, positions, device)
    known = _maps_of_tensors.setdefault(positions, {})
    if (spec, device) not in known:
        with torch.inference_mode(False):  # they may be used in training later
            known[spec, device] = _build_maps_at(spec, positions, device)
    return known[spec, device]


# For positions that hold tensors: by encoding and device, as long as the positions live.
_maps_of_tensors: Any = WeakKeyDictionary()


def _check_positions(spec: Encoding, positions: Positions) -> None:
    """Raises an error if an encoding has no rows for the offsets between these positions."""
    if positions.grid is None and not spec.any_positions:
        raise UserError(
            f"encoding '{spec}' is made for the offsets on one grid, but the tokens are on "
            f"{positions}: use METHOD-MODE-TARGETS with euclidean, cross or product, such as "
            "'product-contextual-k'"
        )
    if spec.method == "quantization" and positions.has_real_places:
        raise UserError(
            f"encoding '{spec}': real offsets, here on {positions}, have no rank among the "
            "distances of a grid; method 'euclidean' takes real ones"
        )


@cached_constant(maxsize=32)
def _constant_maps_at(
    spec: Encoding, constant: tuple[Any, ...], device: torch.device
) -> tuple[BucketMap, ...]:
    """Takes plain values: the compiler does not take a constant of another such function."""
    return _build_maps_at(spec, positions_of(constant), device)


def _build_maps_at(
    spec: Encoding, positions: Positions, device: torch.device
) -> tuple[BucketMap, ...]:
    """Returns the maps; those of one grid are parts of the whole grid's."""
    queries, keys = positions.num_tokens
    _check_pairs((positions.batch or 1) * queries * keys, str(positions))
    grid, has_prefix = positions.grid, any(positions.prefixes)
    if grid is not None:
        # A constant map is made where tensors hold values: `device` may be "meta".
        made_on = device if positions.constant is None else "cpu"
        whole = bucket_maps(spec, grid, int(has_prefix), made_on)
        return tuple(_part_of_map(bucket_map, positions).to(device) for bucket_map in whole)
    assert spec.method is not None
    index = spec.index_on(Grid((1,) * positions.ndim))
    assert index is not None
    _check_rows(spec, spec.method, index, positions.ndim)
    rows = METHODS[spec.method].num_buckets(index.max_index, positions.ndim)
    counts = [count + has_prefix for count in rows]
    dtypes = tuple(map(smallest_dtype, counts))
    found = _ids_of_pairs(spec.method, index, positions, rows, dtypes)
    by_axis = METHODS[spec.method].by_axis
    return tuple(
        _map_of(ids, count, positions, axis if by_axis else None).to(device)
        for axis, (ids, count) in enumerate(zip(found, counts, strict=True))
    )


def _ids_of_pairs(
    method: str,
    index: Index,
    positions: Positions,
    prefix_ids: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
) -> tuple[Integer[Tensor, "*batch query key"], ...]:
    """Returns the row of every pair for each table; `prefix_ids` are those of prefix tokens."""
    queries, keys = positions.places()
    device = keys.device if keys.device.type != "cpu" else queries.device
    queries, keys = queries.to(device), keys.to(device)
    before = positions.prefixes
    lead = () if positions.batch is None else (positions.batch,)
    shape = (*lead, *positions.num_tokens)
    found = tuple(
        torch.full(shape, row, dtype=dtype, device=device)
        for row, dtype in zip(prefix_ids, dtypes, strict=True)
    )
    step = max(1, _PAIRS_AT_ONCE // (keys.shape[-2] * (positions.batch or 1)))
    for start in range(0, queries.shape[-2], step):
        part = queries[..., start : start + step, :]
        offsets = part.unsqueeze(-2) - keys.unsqueeze(-3)
        rows = slice(before[0] + start, before[0] + start + part.shape[-2])
        for ids, of_part in zip(found, METHODS[method].ids(offsets, index), strict=True):
            ids[..., rows, before[1] :] = of_part.to(ids.dtype)
    return found


def _part_of_map(whole: BucketMap, positions: Positions) -> BucketMap:
    """Returns the map of some tokens of a grid: a part of the whole grid's."""
    index = [part.to(whole.compact_ids.device) for part in positions.index_on_grid()]
    compact_ids = whole.compact_ids[index[0].unsqueeze(-1), index[1].unsqueeze(-2)]
    part = BucketMap.from_compact(compact_ids, whole.used_rows, whole.num_buckets)
    if positions.constant is None:
        return part
    number = None if whole.key_axis is None else whole.key_axis.axis
    return _map_of(part.ids, whole.num_buckets, positions, number)


def _map_of(ids: Tensor, num_buckets: int, positions: Positions, axis: int | None) -> BucketMap:
    """Returns the map of these rows; where tensors made it, all rows count as used.

    `axis` is the one that alone decides, if there is one.
    """
    if positions.constant is None:
        return BucketMap.of_rows_in_use(ids, num_buckets, None)
    found, (_, keys) = BucketMap(ids, num_buckets), positions.sides
    if axis is None or isinstance(keys, Subset | Points) or keys.ndim < 2:
        return found
    key_axis = KeyAxis(keys.shape, axis, of_queries=False)
    return BucketMap.from_compact(found.compact_ids, found.used_rows, num_buckets, key_axis)


def _check_pairs(pairs: int, where: str) -> None:
    check_is_holdable("bucket maps on", where, pairs, "use windows or a coarser grid")


def _check_rows(spec: Encoding, method: str, index: Index, ndim: int) -> None:
    rows = max(METHODS[method].num_buckets(index.max_index, ndim))
    check_is_holdable("tables of", spec, rows, "choose a smaller index")


def _build_maps(
    method: str, index: Index | None, grid: Grid, num_prefix_tokens: int
) -> tuple[BucketMap, ...]:
    if index is None:  # every offset has a row of its own
        spans = grid.distinct_offsets().shape[:-1]
        rows = spans.numel()
        return (_build_map(torch.arange(rows).view(spans), rows, grid, num_prefix_tokens, None),)
    ids_by_offset = METHODS[method].ids(grid.distinct_offsets(), index)
    rows = METHODS[method].num_buckets(index.max_index, grid.ndim)
    by_axis = METHODS[method].by_axis and grid.ndim > 1
    return tuple(
        _build_map(ids, count, grid, num_prefix_tokens, axis if by_axis else None)
        for axis, (ids, count) in enumerate(zip(ids_by_offset, rows, strict=True))
    )


def _build_map(
    ids_by_offset: Integer[Tensor, "*spans"],
    rows: int,
    grid: Grid,
    num_prefix_tokens: int,
    axis: int | None,
) -> BucketMap:
    """Spreads the ids of the distinct offsets over all pairs and puts the prefix row around.

    `rows` are without that of prefix tokens; `axis` is the one that alone decides, if there is one.
    """
    used_rows, compact = ids_by_offset.unique(return_inverse=True)
    if num_prefix_tokens:
        used_rows = torch.cat([used_rows, torch.tensor([rows])])
    dtype = smallest_dtype(len(used_rows))
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
    key_axis = None if axis is None else KeyAxis(grid.shape, axis, of_queries=True)
    return BucketMap.from_compact(ids, used_rows, num_buckets, key_axis)
