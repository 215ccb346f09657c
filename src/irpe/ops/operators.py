"""The passes of an implementation as operators, which a compiler calls and does not look into."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from irpe.ops.differentiable import CompactCall, Gradients
from irpe.ops.shapes import Tokens

_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor? table_q, Tensor? table_k, Tensor? mask, "
    "Tensor[] query_tables, Tensor[] key_tables, Tensor[] value_tables, Tensor[] bias_tables, "
    "Tensor[] ids, SymInt[] grid, float scale, float dropout_p, Tensor? seed"
)  # the fields of CompactCall
_library = torch.library.Library("irpe", "DEF")

Forward = Callable[[CompactCall, bool], tuple[Tokens, list[Tensor]]]
Backward = Callable[[CompactCall, Tokens, list[Tensor], bool], Gradients]


def define_operators(name: str, forward: Forward, backward: Backward, fake: Forward) -> None:
    """Defines irpe::NAME and irpe::NAME_backward.

    Args:
        name: The name of the implementation.
        forward: The forward pass, as in `Passes`.
        backward: The backward pass, as in `Passes`.
        fake: What the forward pass returns, by shape alone.
    """

    def as_list(run: Forward) -> Callable[..., list[Tensor]]:
        def listed(*arguments: Any) -> list[Tensor]:
            *fields, keeps = arguments
            out, kept = run(CompactCall(*fields), keeps)
            return [out, *kept]

        return listed

    def run_backward(
        grad: Tensor, kept: list[Tensor], mask_needs_grad: bool, *fields: Any
    ) -> list[Tensor]:
        found = backward(CompactCall(*fields), grad, kept, mask_needs_grad)
        return [x for x in (*found[:6], *found.tables) if x is not None]

    arguments = "Tensor grad, Tensor[] kept, bool mask_needs_grad"
    for operator, signature, run, shapes in (
        (name, f"{_CALL}, bool keeps", as_list(forward), as_list(fake)),
        (f"{name}_backward", f"{arguments}, {_CALL}", run_backward, _fake_backward),
    ):
        _library.define(f"{operator}({signature}) -> Tensor[]")
        _library.impl(operator, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"irpe::{operator}", shapes, lib=_library)
    torch.library.register_autograd(
        f"irpe::{name}", partial(_differentiate, name), setup_context=_keep_call, lib=_library
    )


def _keep_call(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.fields = inputs[:-1]


def _differentiate(name: str, ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    """Returns the gradients of the operator itself, where an exported program calls it.

    Everywhere else `differentiable_attention` stands around it, and this takes no part.
    """
    if name == "triton":  # its backward pass needs what an exported forward pass does not keep
        raise RuntimeError(
            "an exported program with impl 'triton' has no gradients: export it with "
            "impl='blockwise', or train the model itself"
        )
    call, mask_needs_grad = CompactCall(*ctx.fields), ctx.needs_input_grad[5]
    found = call_backward(name, call, grads[0], list(ctx.saved_tensors), mask_needs_grad)
    remaining = iter(found.tables)
    tables = [[next(remaining) for _ in role] for role in call.tables.roles()]
    return (*found[:6], *tables, [None] * len(call.ids), None, None, None, None, None)


def call_forward(name: str, call: CompactCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
    """Returns the output of an operator, and what is kept for its backward pass."""
    out, *kept = getattr(torch.ops.irpe, name).default(*call.arguments(), keeps)
    return out, kept


def call_backward(
    name: str, call: CompactCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
) -> Gradients:
    """Returns the gradients that an operator's backward pass gives."""
    operator = getattr(torch.ops.irpe, f"{name}_backward").default
    remaining = iter(operator(grad, kept, mask_needs_grad, *call.arguments()))
    dq, dk, dv = (next(remaining) for _ in range(3))
    table_dq = None if call.table_q is None else next(remaining)
    table_dk = None if call.table_k is None else next(remaining)
    dmask = next(remaining) if mask_needs_grad else None
    return Gradients(dq, dk, dv, table_dq, table_dk, dmask, list(remaining))


def _fake_backward(
    grad: Tensor, kept: list[Tensor], mask_needs_grad: bool, *fields: Any
) -> list[Tensor]:
    call = CompactCall(*fields)
    inputs = [call.q, call.k, call.v, call.table_q, call.table_k]
    inputs += [call.mask if mask_needs_grad else None, *call.tables.all()]
    dense = torch.contiguous_format
    return [torch.empty_like(x, memory_format=dense) for x in inputs if x is not None]
