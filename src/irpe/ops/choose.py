"""Which implementation computes a call, and why not another."""

from typing import NamedTuple

import torch
from torch import nn

from irpe.errors import UserError, check_choice
from irpe.ops.call import AttentionCall
from irpe.ops.differentiable import is_transformed
from irpe.ops.impl import fast, folded, native, plain, reference, triton
from irpe.ops.proof.decide import Candidate, Prover
from irpe.ops.proof.judge import Implementation
from irpe.ops.proof.prepare import Preparation, prepare_model

_TENSOR_CORES = ("float16", "bfloat16")
PROVER = Prover(
    (
        Candidate("folded", "irpe.ops.impl.folded", _TENSOR_CORES),
        Candidate("triton", "irpe.ops.impl.triton", _TENSOR_CORES),
    ),
    Candidate("fast", "irpe.ops.impl.fast"),
)


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": reference,
    "plain": plain,
    "fast": fast,
    "folded": folded,
    "native": native,
    "triton": triton,
}
_REMARKS = {
    "reference": "it is the specification: one vector for each pair, n^2 d time and memory",
    "plain": "its gradients are PyTorch's own, which keep several elements for each pair",
    "fast": "it takes every call, in slices that suit the device",
    "folded": "fast is faster on a CPU",
    "native": "it is compiled, and its products, softmax and sums go block by block of the cache",
    "triton": "its interpreter is for tests",
}

_OF_A_GPU = "the fastest of what is proved on this GPU; fast needs no proof"


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


def choose(call: AttentionCall, prover: Prover = PROVER, may_prove: bool = True) -> tuple[str, str]:
    """Returns the name of the implementation that "auto" stands for, and why it is taken.

    On a CPU this is a function of the call, of the transforms in force, and of what is installed;
    on a GPU of what was proved and timed there as well.

    Args:
        call: The call.
        prover: What knows the candidates for GPUs.
        may_prove: Whether the first call of its kind on a GPU is proved and timed now.
    """
    if torch.compiler.is_exporting():
        return "plain", "an exporter gets operators that it knows"
    if torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        _check_exporter()
        return "plain", "a trace gets operators that it knows"
    if is_transformed():
        return "plain", "torch.func and forward-mode differentiation need plain operators"
    if call.q.is_cuda:
        return prover.choose(call, may_prove), _OF_A_GPU
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


def explain_choice(call: AttentionCall, prover: Prover = PROVER) -> Explanation:
    """Returns what "auto" stands for, with a reason for each implementation."""
    name, reason = choose(call, prover, may_prove=False)
    known = prover.known(call) if call.q.device.type == "cuda" else {}
    others = {
        other: implementation.supports(call) or known.get(other, _REMARKS[other])
        for other, implementation in IMPLEMENTATIONS.items()
        if other != name
    }
    return Explanation(name, known.get(name, reason), others)


def prepare(model: nn.Module, images: object, training: bool = True) -> Preparation:
    """Proves and times all that a model on a GPU will ask for, before it is needed.

    Servers and compiled models need that: nothing is proved while a program is traced. The model
    runs once for training and once for evaluation; it and the random states stay as they are.

    Args:
        model: The model, on its device; call this within the autocast that it will run in.
        images: A batch of the size to come: what the model is called with, or a tuple or mapping
            of several arguments.
        training: Whether it will be trained, or used alone.

    Examples:
        >>> import irpe, torch
        >>> attention = irpe.RPEAttention(32, num_heads=2, spec="product-contextual-k")
        >>> images = {"x": torch.randn(1, 6, 32), "grid": (2, 3)}
        >>> print(irpe.prepare(attention, images))
        nothing to prove: no call of this model has a candidate on its device
    """
    return prepare_model(PROVER, model, images, training)


def check_impl(name: str) -> None:
    """Raises an error unless `name` is "auto" or the name of an implementation."""
    check_choice("impl", name, ("auto", *IMPLEMENTATIONS))


def select(call: AttentionCall, impl: str) -> Implementation:
    """Returns the implementation that was asked for, or raises an error that says why not."""
    if impl == "auto":
        return IMPLEMENTATIONS[choose(call)[0]]
    if impl not in IMPLEMENTATIONS:
        check_impl(impl)  # says what is wrong
    reason = IMPLEMENTATIONS[impl].supports(call)
    if reason is not None:
        able = [name for name, other in IMPLEMENTATIONS.items() if other.supports(call) is None]
        raise UserError(
            f"impl {impl!r} cannot compute this call: {reason}; use impl='auto' or one of "
            f"{', '.join(able)}"
        )
    return IMPLEMENTATIONS[impl]
