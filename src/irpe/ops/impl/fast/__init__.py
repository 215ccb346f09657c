"""The efficient form with a backward pass of its own, on any device.

Eq. 27-28 carry the tables: each token meets the rows in use, what a pair needs is gathered, and the
backward pass sums pairs up per row. One forward and one backward for a slice of the batch, heads or
queries, and a loop over slices that bounds memory: where one slice is the whole call there is no
loop and no copy. Products with tables happen once, not once a slice. Scores, softmax and sums are
float32 at least.
"""

from irpe.ops.call import AttentionCall
from irpe.ops.differentiable import define_operators, differentiable, is_transformed
from irpe.ops.impl.fast.passes import FastPasses
from irpe.ops.impl.fast.slices import keeps_weights
from irpe.ops.shapes import Tokens

_PASSES = FastPasses()
define_operators(_PASSES)


def supports(call: AttentionCall) -> str | None:
    """Returns why the call cannot be computed here, or `None` if it can."""
    if is_transformed():
        return "torch.func and forward-mode differentiation need plain operators"
    return None


def attention(call: AttentionCall) -> Tokens:
    """Returns what the reference returns."""
    return differentiable(call, _PASSES, keeps_weights(call))
