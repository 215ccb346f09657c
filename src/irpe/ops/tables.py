"""The tables of one attention, and how they are restricted to the rows that a grid uses."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.ops.shapes import ScalarTable, VectorTable


@dataclass(frozen=True)
class Tables:
    """The learned rows, a tuple for each role: one table per bucket map, or none at all.

    The rows of a role's tables are as wide as a head and are added up, or they are narrower and lie
    side by side, so that each table has a share of the dimensions (the concatenation of Eq. 12).

    Args:
        query: r^Q of Eq. 16, multiplied with the keys.
        key: r^K of Eq. 15, multiplied with the queries.
        value: r^V of Eq. 17, added to the values.
        bias: r of Eq. 14, added to the scores.
    """

    query: tuple[VectorTable, ...] = ()
    key: tuple[VectorTable, ...] = ()
    value: tuple[VectorTable, ...] = ()
    bias: tuple[ScalarTable, ...] = ()

    def roles(self) -> tuple[tuple[Tensor, ...], ...]:
        """Returns the tables of query, key, value and bias."""
        return self.query, self.key, self.value, self.bias

    def to(self, dtype: torch.dtype) -> "Tables":
        """Returns the tables in another dtype."""
        return Tables(*(tuple(table.to(dtype) for table in role) for role in self.roles()))

    def used(self, maps: tuple[BucketMap, ...]) -> "Tables":
        """Returns the rows that occur in the maps, in the order that `compact_ids` count."""

        def pick(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            if not tables:
                return ()
            pairs = zip(tables, maps, strict=True)
            return tuple(_used_rows(table, bucket_map) for table, bucket_map in pairs)

        return Tables(*map(pick, self.roles()))

    def widened(self, dim: int) -> "Tables":
        """Returns tables as wide as a head: zeros stand where a table has no share."""

        def widen(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            starts = [share.start or 0 for share in shares(tables, dim)]
            return tuple(
                F.pad(table, (start, dim - start - table.shape[-1]))
                for table, start in zip(tables, starts, strict=True)
            )

        return Tables(widen(self.query), widen(self.key), widen(self.value), self.bias)


def shares(tables: Sequence[VectorTable], dim: int) -> list[slice]:
    """Returns the dimensions of a head that each table of a role meets: all, or its share."""
    widths = [table.shape[-1] for table in tables]
    if all(width == dim for width in widths):
        return [slice(None)] * len(tables)
    ends = accumulate(widths)
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]


def _used_rows(table: Tensor, bucket_map: BucketMap) -> Tensor:
    if bucket_map.num_used_buckets == bucket_map.num_buckets:
        return table
    return table.index_select(1, bucket_map.used_rows)
