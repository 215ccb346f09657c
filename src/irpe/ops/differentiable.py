"""A call in the form that implementations with a backward of their own take, and its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Integer
from torch import Tensor

from irpe.ops.call import AttentionCall, Tables
from irpe.ops.precision import without_autocast
from irpe.ops.shapes import Keys, Mask, Tokens


@dataclass(frozen=True, eq=False)
class CompactCall:
    """A call whose tables hold the rows in use alone.

    Args:
        q: Queries.
        k: Keys.
        v: Values.
        table_q: The queries that the key tables meet, if not q.
        table_k: The keys that the query tables meet, if not k.
        mask: As in `AttentionCall`.
        query_tables: r^Q, the rows in use.
        key_tables: r^K, the rows in use.
        value_tables: r^V, the rows in use.
        bias_tables: The scalars in use.
        ids: The compact ids of each map.
        grid: The grid of the keys; empty if they do not lie on one.
        scale: The factor of the scores.
        dropout_p: The probability with which an attention weight is dropped.
        seed: From which the dropped weights are drawn, in each pass again.
    """

    q: Tokens
    k: Keys
    v: Keys
    table_q: Tokens | None
    table_k: Keys | None
    mask: Mask | None
    query_tables: Sequence[Tensor]
    key_tables: Sequence[Tensor]
    value_tables: Sequence[Tensor]
    bias_tables: Sequence[Tensor]
    ids: Sequence[Integer[Tensor, "*batch query key"]]
    grid: Sequence[int]
    scale: float
    dropout_p: float
    seed: Tensor | None

    @classmethod
    def of(cls, call: AttentionCall) -> "CompactCall":
        """Returns the compact form of a call."""
        used, grids = call.tables.used(call.maps), {m.grid for m in call.maps}
        return cls(
            call.q,
            call.k,
            call.v,
            None if call.table_q is call.q else call.table_q,
            None if call.table_k is call.k else call.table_k,
            call.mask,
            *used.roles(),
            ids=[m.compact_ids for m in call.maps],
            grid=list(next(iter(grids)) or ()) if len(grids) == 1 else [],
            scale=call.scale,
            dropout_p=call.dropout_p,
            seed=torch.randint(2**62, ()) if call.dropout_p else None,
        )

    @property
    def tables(self) -> Tables:
        """The tables by role."""
        roles = (self.query_tables, self.key_tables, self.value_tables, self.bias_tables)
        return Tables(*map(tuple, roles))

    def arguments(self) -> list[Any]:
        """Returns all fields in order."""
        return [getattr(self, field.name) for field in fields(self)]

    def leaves(self) -> list[Tensor | None]:
        """Returns what may need a gradient: the first six fields, then the tables in order."""
        return [*self.arguments()[:6], *self.tables.all()]


class Gradients(NamedTuple):
    """The gradients of a call; `None` for what is not there or needs none."""

    q: Tokens
    k: Keys
    v: Keys
    table_q: Tokens | None
    table_k: Keys | None
    mask: Tensor | None
    tables: list[Tensor]

    def to(self, dtype: torch.dtype) -> "Gradients":
        """Returns the gradients in another dtype."""
        if self.q.dtype == dtype:
            return self
        table_q, table_k, mask = (None if x is None else x.to(dtype) for x in self[3:6])
        q, k, v, tables = self.q.to(dtype), self.k.to(dtype), self.v.to(dtype), self.tables
        return Gradients(q, k, v, table_q, table_k, mask, [x.to(dtype) for x in tables])


class Passes(Protocol):
    """A forward and a backward pass."""

    @staticmethod
    def forward(call: CompactCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output, and what is kept for the backward pass: if anything, the weights."""
        ...

    @staticmethod
    def backward(
        call: CompactCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
    ) -> Gradients:
        """Returns the gradients, given that of the output and what was kept."""
        ...


def differentiable_attention(call: AttentionCall, passes: type[Passes], keeps: bool) -> Tokens:
    """Returns the output of a forward pass, whose gradient is the backward pass.

    Args:
        call: The call.
        passes: The two passes.
        keeps: Whether the attention weights are kept for the backward pass, or made again there.
    """
    compact = CompactCall.of(call)
    if not call.needs_grad:
        return passes.forward(compact, False)[0]
    rest = _Rest(
        tuple(compact.ids),
        tuple(compact.grid),
        compact.scale,
        compact.dropout_p,
        compact.seed,
        tuple(map(len, compact.tables.roles())),
    )
    leaves = compact.leaves()
    if torch.compiler.is_compiling():
        leaves = _without_repetition(leaves)
    return _Attention.apply(passes, keeps, rest, *leaves)


def _without_repetition(leaves: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Returns the leaves, a view for each that came before: a compiler takes none of them twice."""
    found: list[Tensor | None] = []
    for leaf in leaves:
        is_repeated = leaf is not None and any(leaf is other for other in found)
        found.append(leaf.view_as(leaf) if is_repeated and leaf is not None else leaf)
    return found


class _Rest(NamedTuple):
    """What has no gradient."""

    ids: tuple[Tensor, ...]
    grid: tuple[int, ...]
    scale: float
    dropout_p: float
    seed: Tensor | None
    num_tables: tuple[int, ...]

    def with_leaves(self, leaves: Sequence[Any]) -> CompactCall:
        arguments: list[Any] = list(leaves[:6])
        start = 6
        for count in self.num_tables:
            arguments.append(list(leaves[start : start + count]))
            start += count
        arguments += [list(self.ids), list(self.grid), self.scale, self.dropout_p, self.seed]
        return CompactCall(*arguments)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, passes: type[Passes], keeps: bool, rest: _Rest, *leaves: Tensor | None
    ) -> Tokens:
        out, kept = passes.forward(rest.with_leaves(leaves), keeps)
        ctx.passes, ctx.rest, ctx.num_kept = passes, rest, len(kept)
        ctx.save_for_backward(*kept, *leaves)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tokens) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise NotImplementedError(
                "this attention cannot be differentiated twice (create_graph=True): pass "
                "impl='plain' to the call, the module or irpe.equip"
            )
        saved = ctx.saved_tensors  # read once: checkpointing makes it anew
        kept, call = saved[: ctx.num_kept], ctx.rest.with_leaves(saved[ctx.num_kept :])
        with without_autocast(grad):  # a backward pass may run inside autocast
            found = ctx.passes.backward(call, grad, list(kept), ctx.needs_input_grad[8])
        return (None, None, None, *found[:6], *found.tables)
