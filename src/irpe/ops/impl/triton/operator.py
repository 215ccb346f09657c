"""The two passes in kernels. Nothing here imports triton before it is called."""

import torch
from torch import Tensor

from irpe.ops.call import AttentionCall
from irpe.ops.differentiable import Gradients
from irpe.ops.precision import accumulation_dtype
from irpe.ops.shapes import Tokens


class TritonPasses:
    """The two passes of `irpe.ops.differentiable`."""

    name = "triton"
    keeps_output = True

    def forward(self, call: AttentionCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output and, if asked to, what is kept for the backward pass.

        That is the softmax of each query (its largest score and one over its sum), the sums of the
        weights for value tables, and what rounding to 16 bits took away.
        """
        from irpe.ops.impl.triton.launch import Launch

        return Launch(call).forward(keeps)

    def backward(
        self, call: AttentionCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
    ) -> Gradients:
        """Returns the gradients, given that of the output and what was kept, the output first."""
        from irpe.ops.impl.triton.launch import Launch

        return Launch(call).backward(grad, kept, mask_needs_grad)

    def fake_forward(self, call: AttentionCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns tensors of the shapes of what `forward` returns."""
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
