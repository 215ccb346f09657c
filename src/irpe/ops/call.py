"""One call of attention with encodings, as a value: what every implementation is given."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from irpe.core.bucket_map import BucketMap
from irpe.ops.shapes import Keys, Mask, ScalarTable, Tokens, VectorTable


class AttentionCall(NamedTuple):
    """The arguments of `rpe_attention`, checked and brought into one form (`irpe.ops.checks`).

    All floating-point tensors have one dtype. Tables hold the rows in use alone: row `m` of a table
    is row `bucket_map.used_rows[m]` of the learned one, and pairs use it by `compact_ids`. The
    tables of one kind either all have the head dimension and are summed, or split it between them
    (the concatenation of Eq. 12).

    Args:
        q: Queries, as they enter the dot product.
        k: Keys, as they enter the dot product.
        v: Values.
        table_q: The queries that the key tables meet, before a rotation; `None` if they are q.
        table_k: The keys that the query tables meet, before a rotation; `None` if they are k.
        mask: True where a key takes part, or scores to add to the scaled ones; four axes, each of
            full size or 1.
        query_tables: r^Q of Eq. 16, multiplied with the keys: one for each map, or none.
        key_tables: r^K of Eq. 15, multiplied with the queries.
        value_tables: r^V of Eq. 17, added to the values.
        bias_tables: r of Eq. 14, added to the scores before they are scaled.
        maps: The bucket maps.
        scale: The factor of the scores.
        dropout_p: The probability with which an attention weight is dropped.
        seed: From which dropped weights are drawn, where weights are dropped.
    """

    q: Tokens
    k: Keys
    v: Keys
    table_q: Tokens | None
    table_k: Keys | None
    mask: Mask | None
    query_tables: tuple[VectorTable, ...]
    key_tables: tuple[VectorTable, ...]
    value_tables: tuple[VectorTable, ...]
    bias_tables: tuple[ScalarTable, ...]
    maps: tuple[BucketMap, ...]
    scale: float
    dropout_p: float
    seed: Tensor | None

    @property
    def needs_grad(self) -> bool:
        """Whether a backward pass may follow."""
        return torch.is_grad_enabled() and needs_grad(self.leaves())

    @property
    def num_pairs(self) -> int:
        """The number of attention weights: batch x heads x queries x keys."""
        batch, heads, queries, _ = self.q.shape
        return batch * heads * queries * self.k.shape[2]

    def leaves(self) -> tuple[Tensor | None, ...]:
        """Returns what may need a gradient: tokens and mask, then all tables."""
        return (
            *self[:6],
            *self.query_tables,
            *self.key_tables,
            *self.value_tables,
            *self.bias_tables,
        )

    def with_leaves(self, leaves: Sequence[Tensor | None]) -> "AttentionCall":
        """Returns the call with other tensors in the places of its `leaves`."""
        tables: list[tuple[Tensor | None, ...]] = []
        start = 6
        for kind in self[6:10]:
            tables.append(tuple(leaves[start : start + len(kind)]))
            start += len(kind)
        return AttentionCall(*leaves[:6], *tables, *self[10:])  # pyright: ignore

    def contiguous(self) -> "AttentionCall":
        """Returns the call with tokens that lie in memory in the order of their axes."""
        tokens = [x if x is None else x.contiguous() for x in self[:5]]
        return AttentionCall(*tokens, *self[5:])  # pyright: ignore

    def to(self, dtype: torch.dtype) -> "AttentionCall":
        """Returns the call with all floating-point tensors in a dtype."""
        return self.with_leaves(
            [x if x is None or x.dtype == torch.bool else x.to(dtype) for x in self.leaves()]
        )


def needs_grad(leaves: Sequence[Tensor | None]) -> bool:
    """Tells whether one of these tensors needs a gradient."""
    return any([x is not None and x.requires_grad for x in leaves])  # noqa: C419  quicker


def head_slices(tables: Sequence[VectorTable], dim: int) -> list[slice]:
    """Returns the dimensions of a head that each table of a kind has: all, or a part of them."""
    widths = [table.shape[-1] for table in tables]
    if all(width == dim for width in widths):
        return [slice(None)] * len(tables)
    ends = accumulate(widths)
    return [slice(end - width, end) for end, width in zip(ends, widths, strict=True)]
