"""Bucket ids as the kernels read them: those of all maps in one integer, and lists by tile."""

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Integer
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

LARGEST_TILE = 64  # tokens in a tile, of queries or of keys
_PAIRS_AT_ONCE = 2**22  # bounds the 64-bit indices that exist while lists are made


class TileRows(NamedTuple):
    """The table rows that occur in each tile, so that sums visit no others.

    Args:
        rows: For each tile, those rows in ascending order, then all others.
        ends: For each tile and map, where the rows of the map end.
    """

    rows: Integer[Tensor, "batch tiles rows"]
    ends: Integer[Tensor, "batch tiles maps"]


@dataclass(eq=False)
class PackedIds:
    """The ids of all maps, side by side in the bits of one integer.

    The rows of all maps are counted through, as in the joined tables.

    Args:
        ids: The packed ids; one image if all of them share it. In memory they
            go on to whole tiles, with zeros, so that no kernel asks where they end.
        bits: How many bits each map has.
        rows: The number of rows of each map.
        sources: Of which tensors they were made.
        tiles: The lists made so far, by the shape of a tile.
    """

    ids: Integer[Tensor, "batch query key"]
    bits: int
    rows: tuple[int, ...]
    sources: list[Any]
    tiles: dict[tuple[int, int], TileRows] = field(default_factory=dict)

    def rows_of_tiles(self, queries: int, keys: int) -> TileRows:
        """Returns the rows that occur in each tile of so many queries and keys; found once."""
        if (queries, keys) not in self.tiles:
            self.tiles[queries, keys] = _find_rows(self, queries, keys)
        return self.tiles[queries, keys]

    def of_map(self, index: int) -> Integer[Tensor, "batch query key"]:
        """Returns the rows of one map."""
        if len(self.rows) == 1:
            return self.ids
        return (self.ids.int() >> (index * self.bits)) & ((1 << self.bits) - 1)


def bits_of_maps(rows: Sequence[int]) -> int:
    """Returns how many bits each map needs, its rows counted through with those of the others."""
    return max(1, (sum(rows) - 1).bit_length())


_packed: Any = WeakIdKeyDictionary()  # for the ids of each first map, as long as they live


def pack_ids(ids: Sequence[Integer[Tensor, "*batch query key"]], rows: Sequence[int]) -> PackedIds:
    """Returns the packed ids of some maps; made once for each tuple of ids."""
    found: PackedIds | None = _packed.get(ids[0])
    is_same = found is not None and found.rows == tuple(rows)
    if found is not None and is_same and all(map(_is_of, found.sources, ids[1:])):
        return found
    made = PackedIds(_pack(ids, rows), bits_of_maps(rows), tuple(rows), [])
    made.sources.extend(weakref.ref(other) for other in ids[1:])
    _packed[ids[0]] = made
    return made


def _is_of(source: Any, ids: Tensor) -> bool:
    return source() is ids


def _pack(ids: Sequence[Tensor], rows: Sequence[int]) -> Integer[Tensor, "batch query key"]:
    bits, start, total = bits_of_maps(rows), 0, torch.zeros((), dtype=torch.int32)
    if len(ids) == 1:
        total, dtype = ids[0], ids[0].dtype
    else:
        dtype = torch.int16 if len(ids) * bits <= 16 else torch.int32
        for index, (of_map, count) in enumerate(zip(ids, rows, strict=True)):
            total = total.to(of_map.device) | (of_map.int() + start) << (index * bits)
            start += count
    total = total if total.ndim == 3 else total.unsqueeze(0)
    batch, *sizes = total.shape
    whole = [math.ceil(size / LARGEST_TILE) * LARGEST_TILE for size in sizes]
    padded = torch.zeros(batch, *whole, dtype=dtype, device=total.device)
    return padded[:, : sizes[0], : sizes[1]].copy_(total)


def _find_rows(packed: PackedIds, queries: int, keys: int) -> TileRows:
    batch, height, width = packed.ids.shape
    tile_rows, tile_columns = math.ceil(height / queries), math.ceil(width / keys)
    count = sum(packed.rows)
    device = packed.ids.device
    occurs = torch.zeros(batch, tile_rows * tile_columns, count, dtype=torch.bool, device=device)
    column = torch.arange(width, device=device) // keys
    step = max(1, _PAIRS_AT_ONCE // max(1, width))
    for image in range(batch):
        flat = occurs[image].view(-1)
        for start in range(0, height, step):
            row = torch.arange(start, min(height, start + step), device=device) // queries
            tile = row[:, None] * tile_columns + column
            for index in range(len(packed.rows)):
                ids = packed.of_map(index)[image, start : start + step]
                flat[(tile * count + ids.long()).flatten()] = True
    order = occurs.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
    of_maps = [part.sum(-1) for part in occurs.split(packed.rows, dim=-1)]
    ends = torch.stack(of_maps, dim=-1).cumsum(-1)
    return TileRows(order.to(torch.int16), ends.to(torch.int32))
