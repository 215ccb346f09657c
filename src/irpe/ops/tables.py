"""The tables of one attention, and how they are restricted to the rows that a grid uses."""

from dataclasses import dataclass

import torch
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.ops.shapes import ScalarTable, VectorTable


@dataclass(frozen=True)
class Tables:
    """The learned rows, a tuple for each role: one table per bucket map, or none at all.

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


def _used_rows(table: Tensor, bucket_map: BucketMap) -> Tensor:
    if bucket_map.num_used_buckets == bucket_map.num_buckets:
        return table
    return table.index_select(1, bucket_map.used_rows)
