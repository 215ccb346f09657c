"""The two passes in kernels, as operators. Nothing here imports triton before it is called."""

import torch
from torch import Tensor

from irpe.ops.differentiable import CompactCall, Gradients
from irpe.ops.operators import call_backward, call_forward, define_operators
from irpe.ops.precision import accumulation_dtype
from irpe.ops.shapes import Tokens


class TritonPasses:
    """The passes of `differentiable_attention`."""

    @staticmethod
    def forward(call: CompactCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output and, if asked to, what is kept for the backward pass.

        That is the output itself, the softmax of each query (its largest score and one over its
        sum), the sums of the weights for value tables, and what rounding to 16 bits took away.
        """
        out, kept = call_forward("triton", call, keeps)
        return out, [out, *kept] if keeps else []

    @staticmethod
    def backward(
        call: CompactCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
    ) -> Gradients:
        """Returns the gradients."""
        return call_backward("triton", call, grad, kept, mask_needs_grad)


def _forward(call: CompactCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
    from irpe.ops.impl.triton.launch import Launch

    return Launch(call).forward(keeps)


def _backward(
    call: CompactCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
) -> Gradients:
    from irpe.ops.impl.triton.launch import Launch

    return Launch(call).backward(grad, kept, mask_needs_grad)


def _fake_forward(call: CompactCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
    out, dtype = call.q.new_empty(call.q.shape), accumulation_dtype(call.q.dtype)
    if not keeps:
        return out, []
    batch, heads, queries, _ = call.q.shape
    kept = [call.q.new_empty(2, batch, heads, queries, dtype=dtype)]
    if call.value_tables:
        rows = sum(table.shape[1] for table in call.value_tables)
        kept.append(call.q.new_empty(batch, heads, rows, queries, dtype=dtype))
    if call.q.dtype != dtype:
        kept.append(torch.empty_like(out))
    return out, kept


define_operators("triton", _forward, _backward, _fake_forward)
