"""One call of attention with encodings, as a value: what every implementation is given."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from irpe.core.buckets import BucketMap
from irpe.ops.shapes import Keys, Mask, ScalarTable, Tokens, VectorTable


@dataclass(frozen=True)
class Tables:
    """The learned rows, a tuple for each role: one table per bucket map, or none at all.

    The tables of one role either all have the head dimension and are summed, or split it between
    them (the concatenation of Eq. 12).

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

    @classmethod
    def of(cls, *roles: Sequence[Tensor] | None) -> "Tables":
        """Returns the tables of query, key, value and bias, each of which may be `None`."""
        return cls(*(tuple(role or ()) for role in roles))

    def roles(self) -> tuple[tuple[Tensor, ...], ...]:
        """Returns the tables of query, key, value and bias."""
        return self.query, self.key, self.value, self.bias

    def all(self) -> tuple[Tensor, ...]:
        """Returns all tables in the order of `roles`."""
        return (*self.query, *self.key, *self.value, *self.bias)

    def to(self, dtype: torch.dtype) -> "Tables":
        """Returns the tables in another dtype."""
        return Tables(*(tuple(table.to(dtype) for table in role) for role in self.roles()))

    def used(self, maps: Sequence[BucketMap]) -> "Tables":
        """Returns the rows that the maps use, in the order of their `compact_ids`."""

        def pick(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            pairs = zip(tables, maps, strict=bool(tables))
            return tuple(_used_rows(table, bucket_map) for table, bucket_map in pairs)

        return Tables(*map(pick, self.roles()))

    def widened(self, dim: int) -> "Tables":
        """Returns tables of the head dimension: zeros stand where a table has no dimensions."""

        def widen(tables: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            starts = [dims.start or 0 for dims in head_slices(tables, dim)]
            return tuple(
                F.pad(table, (start, dim - start - table.shape[-1]))
                for table, start in zip(tables, starts, strict=True)
            )

        return Tables(widen(self.query), widen(self.key), widen(self.value), self.bias)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """The arguments of `rpe_attention`, checked and brought into one form.

    Args:
        q: Queries, as they enter the dot product.
        k: Keys, as they enter the dot product.
        v: Values.
        maps: The bucket maps.
        tables: The tables.
        mask: True where a key takes part, or scores to add to the scaled ones; four axes, each of
            full size or 1.
        dropout_p: The probability with which an attention weight is dropped.
        scale: The factor of the scores.
        table_q: The queries that the key tables meet: q, or q before a rotation.
        table_k: The keys that the query tables meet: k, or k before a rotation.
    """

    q: Tokens
    k: Keys
    v: Keys
    maps: tuple[BucketMap, ...]
    tables: Tables
    mask: Mask | None
    dropout_p: float
    scale: float
    table_q: Tokens
    table_k: Keys

    @property
    def is_rotated(self) -> bool:
        """Whether the tables meet other queries or keys than the dot product."""
        return self.table_q is not self.q or self.table_k is not self.k

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass may follow."""
        tensors = (self.q, self.k, self.v, self.table_q, self.table_k, *self.tables.all())
        mask = () if self.mask is None else (self.mask,)
        return torch.is_grad_enabled() and any(x.requires_grad for x in (*tensors, *mask))

    @property
    def num_pairs(self) -> int:
        """The number of attention weights: batch x heads x queries x keys."""
        batch, heads, queries, _ = self.q.shape
        return batch * heads * queries * self.k.shape[2]

    def to(self, dtype: torch.dtype) -> "AttentionCall":
        """Returns the call with all floating-point tensors in a dtype."""
        mask = () if self.mask is None or self.mask.dtype == torch.bool else (self.mask,)
        if all(x.dtype == dtype for x in (self.q, *self.tables.all(), *mask)):
            return self
        q, k = self.q.to(dtype), self.k.to(dtype)
        return replace(
            self,
            q=q,
            k=k,
            v=self.v.to(dtype),
            table_q=q if self.table_q is self.q else self.table_q.to(dtype),
            table_k=k if self.table_k is self.k else self.table_k.to(dtype),
            tables=self.tables.to(dtype),
            mask=mask[0].to(dtype) if mask else self.mask,
        )


def head_slices(tables: Sequence[VectorTable], dim: int) -> list[slice]:
    """Returns the dimensions of a head that each table of a role has: all, or a part of them."""
    widths = [table.shape[-1] for table in tables]
    if all(width == dim for width in widths):
        return [slice(None)] * len(tables)
    ends = accumulate(widths)
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]


def _used_rows(table: Tensor, bucket_map: BucketMap) -> Tensor:
    if bucket_map.num_used_buckets == bucket_map.num_buckets:
        return table
    return table.index_select(1, bucket_map.used_rows)
