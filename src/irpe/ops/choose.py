"""Which implementation computes a call, and why not another."""

from typing import Any, NamedTuple, Protocol

import torch

from irpe.core.choices import check_choice
from irpe.core.constants import traced_as_constant
from irpe.errors import UserError
from irpe.ops.call import AttentionCall
from irpe.ops.impl import blockwise, folded, plain, reference, triton, whole
from irpe.ops.impl.blockwise.schedule import schedule_of
from irpe.ops.shapes import Tokens

# Whether a GPU has passed the cases of tests/ops/test_triton.py. `python -m benchmarks.gpu` runs
# them and tells when to change it; until then "auto" does not take the kernels.
TRITON_IS_PROVEN = False


class Implementation(Protocol):
    """A way to compute attention: a module of `irpe.ops.impl`."""

    @staticmethod
    def supports(call: AttentionCall) -> str | None:
        """Returns why a call cannot be computed here, or `None` if it can."""
        ...

    @staticmethod
    def attention(call: AttentionCall) -> Tokens:
        """Returns what the reference returns."""
        ...


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": reference,
    "plain": plain,
    "whole": whole,
    "folded": folded,
    "blockwise": blockwise,
    "triton": triton,
}


_REMARKS = {
    "reference": "it is the specification: one vector for each pair, n^2 d time and memory",
    "plain": "its gradients are PyTorch's own, which keep several elements for each pair",
    "whole": "it makes all attention weights at once",
    "folded": "blockwise was as fast or faster, with less memory, at every size measured",
    "blockwise": "it works in blocks that suit the device",
    "triton": "its kernels have not run on a GPU yet; ask for it by name",
}


class Explanation(NamedTuple):
    """What "auto" stands for in a call. Print it.

    Args:
        name: The name of the implementation.
        reason: Why it is taken.
        others: For each other implementation, why it is not.
    """

    name: str
    reason: str
    others: dict[str, str]

    def __str__(self) -> str:
        lines = (f"  not {name}: {reason}" for name, reason in self.others.items())
        return "\n".join([f"{self.name}: {self.reason}", *lines])


def choose(call: AttentionCall) -> tuple[str, str]:
    """Returns the name of the implementation that "auto" stands for, and why it is taken.

    This is a function of the call and of the transforms in force, and of nothing else.
    """
    if torch.compiler.is_exporting():
        return "plain", "an exporter gets operators that it knows"
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        _check_exporter()
        return "plain", "a trace gets operators that it knows"
    if _is_transformed():
        return "plain", "torch.func and forward-mode differentiation need plain operators"
    fused = _why_triton(call)
    if fused is not None:
        return "triton", fused
    blocked = blockwise.supports(call)
    if whole.supports(call) is None:
        if blocked is not None:
            return "whole", f"blockwise is out: {blocked}"
        if call.num_pairs <= _most_pairs_at_once(call):
            return "whole", "its pairs are few enough to be computed at once"
    elif blocked is not None:
        return "plain", f"blockwise is out: {blocked}; whole is out: {whole.supports(call)}"
    return "blockwise", _REMARKS["blockwise"]


def _check_exporter() -> None:
    """Raises an error in PyTorch's former ONNX exporter, which fails on newer operators."""
    if torch.onnx.is_in_onnx_export():
        raise RuntimeError(
            "torch.onnx.export(..., dynamo=False) does not know all operators of attention with an "
            "encoding: leave dynamo out, or pass dynamo=True"
        )


def _why_triton(call: AttentionCall) -> str | None:
    """Returns why the kernels are taken, or `None` if they are not.

    In 16 bits they use tensor cores and hold a tile in registers: all else moves several elements
    of each pair through memory. In float32 they multiply without tensor cores (unless
    `torch.backends.cuda.matmul.allow_tf32` is set), and on ROCm registers do not suffice for head
    dimensions above 64 (benchmarks/results/triton.json); there they are taken only where the
    weights of all pairs would not fit at once.
    """
    if not TRITON_IS_PROVEN or call.q.device.type != "cuda" or triton.supports(call) is not None:
        return None
    is_slow = torch.version.hip is not None and call.q.shape[3] > 64
    if call.q.dtype != torch.float32 and not is_slow:
        return "it is fused, with tensor cores, and keeps nothing of each pair"
    if call.num_pairs > _most_pairs_at_once(call):
        return "it keeps nothing of each pair, of which there are too many to be held at once"
    return None


def _most_pairs_at_once(call: AttentionCall) -> int:
    """Returns up to how many pairs `whole` is faster than `blockwise`.

    Off the CPU that is a question of memory. The sizes for the CPU are those of
    benchmarks/results/implementations.json: a block of the cache; more where PyTorch's own kernel
    takes all of b_ij as a mask, or the products of a head are small. Several maps gain from blocks
    earlier, because only there is what repeats over the grid gathered once.
    """
    one_block = schedule_of(call.q.device).weights
    if call.q.device.type != "cpu":
        return one_block
    if len(call.maps) > 1:
        return one_block if call.needs_grad else one_block // 4
    if not call.needs_grad and not call.tables.value:
        return 8 * one_block
    return 2 * one_block if call.k.shape[2] <= 128 else one_block


def explain_choice(call: AttentionCall) -> Explanation:
    """Returns what "auto" stands for, with a reason for each implementation."""
    name, reason = choose(call)
    others = {
        other: implementation.supports(call) or _REMARKS[other]
        for other, implementation in IMPLEMENTATIONS.items()
        if other != name
    }
    return Explanation(name, reason, others)


def check_impl(name: str) -> None:
    """Raises an error unless `name` is "auto" or the name of an implementation."""
    check_choice("impl", name, ("auto", *IMPLEMENTATIONS))


def select(call: AttentionCall, impl: str) -> Implementation:
    """Returns the implementation that was asked for, or raises an error that says why not."""
    check_impl(impl)
    if impl == "auto":
        return IMPLEMENTATIONS[choose(call)[0]]
    reason = IMPLEMENTATIONS[impl].supports(call)
    if reason is not None:
        able = [name for name, other in IMPLEMENTATIONS.items() if other.supports(call) is None]
        raise UserError(
            f"impl {impl!r} cannot compute this call: {reason}; use impl='auto' or one of "
            f"{', '.join(able)}"
        )
    return IMPLEMENTATIONS[impl]


@traced_as_constant
def _is_transformed() -> bool:
    """Tells whether a transform of torch.func, or forward-mode differentiation, is in force."""
    native: Any = torch._C
    in_transform = native._functorch.maybe_current_level() is not None
    return in_transform or torch.autograd.forward_ad._current_level >= 0
