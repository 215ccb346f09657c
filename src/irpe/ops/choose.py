"""Which implementation computes a call, and why not another."""

from typing import NamedTuple, Protocol

import torch

from irpe.core.choices import check_choice
from irpe.errors import UserError
from irpe.ops.call import AttentionCall
from irpe.ops.differentiable import is_transformed
from irpe.ops.impl import fast, native, plain, reference, triton
from irpe.ops.shapes import Tokens

# Whether a GPU has passed the cases of tests/ops/test_triton.py. `python -m benchmarks.gpu` runs
# them and tells when to change it; until then "auto" does not take the kernels.
TRITON_IS_PROVEN = False
_PAIRS_IN_MEMORY = 2**26  # 256 MiB of scores in float32


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
    "fast": fast,
    "native": native,
    "triton": triton,
}
_REMARKS = {
    "reference": "it is the specification: one vector for each pair, n^2 d time and memory",
    "plain": "its gradients are PyTorch's own, which keep several elements for each pair",
    "fast": "it takes every call, in slices that suit the device",
    "native": "it is compiled, and its products, softmax and sums go block by block of the cache",
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

    This is a function of the call, of the transforms in force, and of what is installed.
    """
    if torch.compiler.is_exporting():
        return "plain", "an exporter gets operators that it knows"
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        _check_exporter()
        return "plain", "a trace gets operators that it knows"
    if is_transformed():
        return "plain", "torch.func and forward-mode differentiation need plain operators"
    fused = _why_triton(call) if TRITON_IS_PROVEN else None
    if fused is not None:
        return "triton", fused
    if native.supports(call) is None:
        return "native", _REMARKS["native"]
    return "fast", _REMARKS["fast"]


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
    if call.q.device.type != "cuda" or triton.supports(call) is not None:
        return None
    is_slow = torch.version.hip is not None and call.q.shape[3] > 64
    if call.q.dtype != torch.float32 and not is_slow:
        return "it is fused, with tensor cores, and keeps nothing of each pair"
    if call.num_pairs > _PAIRS_IN_MEMORY:
        return "it keeps nothing of each pair, of which there are too many to be held at once"
    return None


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
    if impl == "auto":
        return IMPLEMENTATIONS[choose(call)[0]]
    check_impl(impl)
    reason = IMPLEMENTATIONS[impl].supports(call)
    if reason is not None:
        able = [name for name, other in IMPLEMENTATIONS.items() if other.supports(call) is None]
        raise UserError(
            f"impl {impl!r} cannot compute this call: {reason}; use impl='auto' or one of "
            f"{', '.join(able)}"
        )
    return IMPLEMENTATIONS[impl]
