"""The two passes over blocks, as operators."""

from torch import Tensor

from irpe.ops.differentiable import CompactCall, Gradients
from irpe.ops.impl.blockwise.passes import BlockPasses
from irpe.ops.impl.blockwise.roles import keeps_sums
from irpe.ops.impl.blockwise.schedule import make_blocks
from irpe.ops.operators import call_backward, call_forward, define_operators
from irpe.ops.precision import accumulation_dtype
from irpe.ops.shapes import Tokens


class OperatorPasses:
    """The passes of `differentiable_attention`."""

    @staticmethod
    def forward(call: CompactCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
        """Returns the output, and what is kept for the backward pass."""
        return call_forward("blockwise", call, keeps)

    @staticmethod
    def backward(
        call: CompactCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
    ) -> Gradients:
        """Returns the gradients."""
        return call_backward("blockwise", call, grad, kept, mask_needs_grad)


def _forward(call: CompactCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
    makes_weights = keeps or bool(call.value_tables) or call.dropout_p > 0
    return BlockPasses(call, make_blocks(call, makes_weights)).forward(keeps)


def _backward(
    call: CompactCall, grad: Tokens, kept: list[Tensor], mask_needs_grad: bool
) -> Gradients:
    passes = BlockPasses(call, make_blocks(call, makes_weights=True))
    return passes.backward(grad, kept, mask_needs_grad)


def _fake_forward(call: CompactCall, keeps: bool) -> tuple[Tokens, list[Tensor]]:
    shape, dtype = call.q.shape[:3], accumulation_dtype(call.q.dtype)
    out = call.q.new_empty(*shape, call.v.shape[3])
    if not keeps:
        return out, []
    widths = [call.k.shape[2]]
    if keeps_sums(call.value_tables, call.ids):
        widths.append(sum(table.shape[1] for table in call.value_tables))
    return out, [call.q.new_empty(*shape, width, dtype=dtype) for width in widths]


define_operators("blockwise", _forward, _backward, _fake_forward)
