"""The two passes as operators, which a compiler calls and does not look into."""

from typing import Any

import torch
from torch import Tensor

from irpe.ops.differentiable import CompactCall, Gradients
from irpe.ops.impl.blockwise.passes import BlockPasses
from irpe.ops.impl.blockwise.roles import keeps_sums
from irpe.ops.impl.blockwise.schedule import make_blocks
from irpe.ops.precision import accumulation_dtype
from irpe.ops.shapes import Tokens

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? table_q, Tensor? table_k, Tensor? mask, "
    "Tensor[] query_tables, Tensor[] key_tables, Tensor[] value_tables, Tensor[] bias_tables, "
    "Tensor[] ids, SymInt[] grid, float scale, float dropout_p, Tensor? seed"
)  # the fields of CompactCall
_library = torch.library.Library("irpe", "DEF")
_library.define(f"blockwise({_CALL}, bool keeps) -> Tensor[]")
_library.define(
    f"blockwise_backward(Tensor grad, Tensor[] kept, bool mask_needs_grad, {_CALL}) -> Tensor[]"
)


class OperatorPasses:
    """The passes of `differentiable_attention`."""

    @staticmethod
    def forward(call: CompactCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output, and what is kept for the backward pass."""
        out, *kept = torch.ops.irpe.blockwise.default(*call.arguments(), keeps)
        return out, kept

    @staticmethod
    def backward(
        call: CompactCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
    ) -> Gradients:
        """Returns the gradients."""
        found = torch.ops.irpe.blockwise_backward.default(
            grad, kept, mask_needs_grad, *call.arguments()
        )
        return _as_gradients(call, found, mask_needs_grad)


def _forward(*arguments: Any) -> list[Tensor]:
    *fields, keeps = arguments
    call = CompactCall(*fields)
    makes_weights = keeps or bool(call.value_tables) or call.dropout_p > 0
    out, kept = BlockPasses(call, make_blocks(call, makes_weights)).forward(keeps)
    return [out, *kept]


def _backward(
    grad: Tensor, kept: list[Tensor], mask_needs_grad: bool, *fields: Any
) -> list[Tensor]:
    call = CompactCall(*fields)
    passes = BlockPasses(call, make_blocks(call, makes_weights=True))
    found = passes.backward(grad, kept, mask_needs_grad)
    return [x for x in (*found[:6], *found.tables) if x is not None]


def _as_gradients(call: CompactCall, found: list[Tensor], mask_needs_grad: bool) -> Gradients:
    """Returns a list of gradients by name; it has none for what is not there."""
    remaining = iter(found)
    dq, dk, dv = (next(remaining) for _ in range(3))
    table_dq = None if call.table_q is None else next(remaining)
    table_dk = None if call.table_k is None else next(remaining)
    dmask = next(remaining) if mask_needs_grad else None
    return Gradients(dq, dk, dv, table_dq, table_dk, dmask, list(remaining))


def _fake_forward(*arguments: Any) -> list[Tensor]:
    *fields, keeps = arguments
    call = CompactCall(*fields)
    shape, dtype = call.q.shape[:3], accumulation_dtype(call.q.dtype)
    out = call.q.new_empty(*shape, call.v.shape[3])
    if not keeps:
        return [out]
    widths = [call.k.shape[2]]
    if keeps_sums(call.value_tables, call.ids):
        widths.append(sum(table.shape[1] for table in call.value_tables))
    return [out, *(call.q.new_empty(*shape, width, dtype=dtype) for width in widths)]


def _fake_backward(
    grad: Tensor, kept: list[Tensor], mask_needs_grad: bool, *fields: Any
) -> list[Tensor]:
    call = CompactCall(*fields)
    inputs = [call.q, call.k, call.v, call.table_q, call.table_k]
    inputs += [call.mask if mask_needs_grad else None, *call.tables.all()]
    dense = torch.contiguous_format
    return [torch.empty_like(x, memory_format=dense) for x in inputs if x is not None]


for _name, _pass, _fake in (
    ("blockwise", _forward, _fake_forward),
    ("blockwise_backward", _backward, _fake_backward),
):
    _library.impl(_name, _pass, "CompositeExplicitAutograd")
    torch.library.register_fake(f"irpe::{_name}", _fake, lib=_library)


def _keep_call(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.fields = inputs[:-1]


def _differentiate(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """Returns the gradients of the operator itself, where an exported program calls it.

    Everywhere else `differentiable_attention` stands around it and takes no part of this.
    """
    call, mask_needs_grad = CompactCall(*ctx.fields), ctx.needs_input_grad[5]
    kept = list(ctx.saved_tensors)
    found = OperatorPasses.backward(call, grads[0], kept, mask_needs_grad)
    remaining = iter(found.tables)
    tables = [[next(remaining) for _ in role] for role in call.tables.roles()]
    return (*found[:6], *tables, [None] * len(call.ids), None, None, None, None, None)


torch.library.register_autograd(
    "irpe::blockwise", _differentiate, setup_context=_keep_call, lib=_library
)
