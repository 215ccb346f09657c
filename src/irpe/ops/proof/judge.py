"""The proof itself: output and every gradient against the reference, by PyTorch's own error.

On random tensors of a signature, the error of a candidate may be at most twice that of
`scaled_dot_product_attention` in the same dtype, which is given the exact b_ij times the scale as
its mask. The exact values are those of the reference in float64. NaN is an error. What is called
deterministic must give the same bits twice.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from irpe.ops.call import AttentionCall
from irpe.ops.impl import reference
from irpe.ops.proof.problem import DROPOUT, Problem, small_problems
from irpe.ops.proof.signature import Signature
from irpe.ops.shapes import Scores, Tokens

_SEED = 7
_FLOORS = {torch.float16: 1 / 64, torch.bfloat16: 1 / 64}  # times eps and the largest element
_DROPPED_WRONG = 0.05  # more than six standard deviations of the fraction that is kept

Attend = Callable[[AttentionCall], Tokens]
Results = dict[str, Tensor | None]  # the output, and the gradient of each leaf by its name


class Implementation(Protocol):
    """What a candidate's module has. `IS_DETERMINISTIC` may be missing, which means it is not."""

    @staticmethod
    def supports(call: AttentionCall) -> str | None:
        """Returns why a call cannot be computed, or `None` if it can."""
        ...

    @staticmethod
    def attention(call: AttentionCall) -> Tokens:
        """Returns what the reference returns."""
        ...


class Answer(NamedTuple):
    """The result of a proof, or of timing a candidate.

    Args:
        error: Why the candidate failed or lost; "" if it did not.
        is_lasting: Whether the error speaks of the candidate, not of the memory that was free.
        worst: The largest error found in a proof, relative to PyTorch's own.
        where: Of which tensor.
        seconds: The time of a call.
    """

    error: str = ""
    is_lasting: bool = True
    worst: float = 0.0
    where: str = ""
    seconds: float = 0.0


def judge(implementation: Implementation, signature: Signature, device: torch.device) -> Answer:
    """Returns whether an implementation computes the calls of a signature, and how well."""
    worst = Answer()
    for problem in small_problems(signature, device):
        found = run(implementation.attention, problem)
        kept = _find_kept(implementation.attention, problem) if signature.dropout else None
        if kept is not None and abs(kept.mean().item() - (1 - DROPOUT)) > _DROPPED_WRONG:
            text = f"dropout with p = {DROPOUT} keeps {kept.mean().item():.1%} of the weights"
            return Answer(text, where="output")
        for name, error in _errors(problem, found, kept).items():
            if not error <= 2.0:
                tokens = problem.parts["q"].shape[2]
                text = f"{name} at {tokens} tokens has {error:.3g} times PyTorch's own error"
                return Answer(text, worst=error, where=name)
            worst = max(worst, Answer(worst=error, where=name))
        if getattr(implementation, "IS_DETERMINISTIC", False):
            changed = _first_difference(found, run(implementation.attention, problem))
            if changed is not None:
                return Answer(f"{changed} differs from one run to the next", where=changed)
    return worst


def run(attend: Attend, problem: Problem) -> Results:
    """Returns the output of a problem and the gradients of its leaves."""
    torch.manual_seed(_SEED)
    leaves = problem.leaves
    with torch.set_grad_enabled(bool(leaves)):
        output = attend(problem.call())
    found: Results = {"output": output.detach()}
    if leaves:
        gradients = torch.autograd.grad(
            output, list(leaves.values()), problem.parts["grad"], allow_unused=True
        )
        found |= {f"gradient of {n}": g for n, g in zip(leaves, gradients, strict=True)}
    return found


def _first_difference(first: Results, second: Results) -> str | None:
    for name, x in first.items():
        other = second[name]
        if x is not None and (other is None or not torch.equal(x, other)):
            return name
    return None


def _find_kept(attend: Attend, problem: Problem) -> Scores:
    """Returns 1 for each weight that was not dropped: unit vectors as values show the weights."""
    keys, dim = problem.parts["v"].shape[2:]
    eye = torch.eye(keys, device=problem.parts["v"].device)
    parts: list[Tensor] = []
    for units in eye.split(dim, dim=1):
        shown = problem.with_values(F.pad(units, (0, dim - units.shape[1])))
        found = run(attend, shown)["output"]
        assert found is not None
        parts.append(found[..., : units.shape[1]])
    return (torch.cat(parts, dim=-1) != 0).double()


def _errors(problem: Problem, found: Results, kept: Scores | None) -> dict[str, float]:
    """Returns the error of each tensor relative to PyTorch's own."""
    exact = run(lambda call: _exact(call, kept), problem.to(torch.float64))
    own = run(lambda call: _pytorchs(call, kept), problem)
    fused = {} if kept is not None else _errors_of_fused(problem)
    dtype = problem.parts["q"].dtype
    floor = torch.finfo(dtype).eps * _FLOORS.get(dtype, 4) * max(map(_largest, exact.values()))
    errors: dict[str, float] = {}
    for name, f in found.items():
        e, o = exact[name], own[name]
        if e is None or o is None:  # nothing depends on it
            errors[name] = 0.0 if f is None or not f.any() else torch.inf
        elif f is None or f.shape != e.shape or f.dtype != dtype:
            errors[name] = torch.inf
        else:
            of_pytorch = _largest((o - e).nan_to_num(0.0))
            of_pytorch = max(of_pytorch, fused.get(name, 0.0), _half_unit(e, dtype))
            errors[name] = _largest(f - e) / (of_pytorch + floor / 2)
    return errors


def _exact(call: AttentionCall, kept: Scores | None) -> Tokens:
    weights = reference.attention_weights(call)
    return _attend(weights if kept is None else weights * kept / (1 - DROPOUT), call)


def _pytorchs(call: AttentionCall, kept: Scores | None) -> Tokens:
    """Returns what PyTorch gives in the dtype of the call, with the exact b_ij as its mask."""
    mask, (q, k, v) = _exact_mask(call), (call.q, call.k, call.v)
    if kept is None and not call.value_tables:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=call.scale)
    units = torch.eye(k.shape[2], dtype=q.dtype, device=q.device).expand(*q.shape[:2], -1, -1)
    weights = F.scaled_dot_product_attention(q, k, units, mask, scale=call.scale)
    return _attend(weights if kept is None else weights * kept.to(q.dtype) / (1 - DROPOUT), call)


def _exact_mask(call: AttentionCall) -> Scores:
    """Returns the exact b_ij times the scale, under the mask of the call, in its dtype."""
    b = reference.position_scores(call.to(torch.float64)) * call.scale
    if call.mask is not None:
        is_boolean = call.mask.dtype == torch.bool
        b = b.masked_fill(~call.mask, -torch.inf) if is_boolean else b + call.mask
    return b.to(call.q.dtype)


def _attend(weights: Scores, call: AttentionCall) -> Tokens:
    """Returns Eq. 17 with given weights."""
    z = weights @ call.v
    for r in reference._vectors_of_pairs(call, call.value_tables):
        z = z + torch.einsum("bhij,bhijd->bhid", weights, r)
    return z


def _errors_of_fused(problem: Problem) -> dict[str, float]:
    """Returns the errors of PyTorch's fused kernels, where they take the call.

    They have no gradient for a mask, so b_ij is a constant here, and the exact values are those
    with that constant.
    """
    mask = _exact_mask(problem.call()).detach().contiguous()
    constants = {name: x if name in "qkv" else x.detach() for name, x in problem.parts.items()}
    problem = problem._replace(parts=constants)

    def attend(call: AttentionCall) -> Tokens:
        bias = mask.to(call.q.dtype)
        return F.scaled_dot_product_attention(call.q, call.k, call.v, bias, scale=call.scale)

    try:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            found = run(attend, problem)
    except RuntimeError:  # no fused kernel takes it
        return {}
    with sdpa_kernel(SDPBackend.MATH):
        exact = run(attend, problem.to(torch.float64))
    differences = {name: (f, exact[name]) for name, f in found.items()}
    return {
        name: _largest((f - e).nan_to_num(0.0))
        for name, (f, e) in differences.items()
        if f is not None and e is not None
    }


def _half_unit(exact: Tensor, dtype: torch.dtype) -> float:
    """Returns half a unit in the last place of the largest element.

    PyTorch's own error counts for as much, because with few elements it is smaller by chance.
    """
    _, exponent = math.frexp(_largest(exact))
    return torch.finfo(dtype).eps / 2 * math.ldexp(1.0, exponent - 1)


def _largest(x: Tensor | None) -> float:
    """Returns the largest magnitude; NaN if there is one."""
    return 0.0 if x is None or not x.numel() else x.abs().max().item()
