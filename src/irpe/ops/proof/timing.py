"""Seconds of one call of real size, and the comparison with `fast` at that size.

Small tensors would miss an overflow of an index, so what is timed is compared here as well.
"""

import statistics
import time

import torch

from irpe.ops.proof.judge import Implementation, Results, run
from irpe.ops.proof.problem import Problem

_REPETITIONS = 7
_SECONDS = 0.5  # no further repetition after as many
_TOLERANCES = {torch.float16: 0.05, torch.bfloat16: 0.05, torch.float32: 0.01}


def seconds_of(implementation: Implementation, problem: Problem) -> float:
    """Returns the median seconds of a forward pass, or of a training step."""
    measure = _cuda_seconds if problem.parts["q"].is_cuda else _seconds
    measure(implementation, problem)  # compiles
    taken: list[float] = []
    while len(taken) < _REPETITIONS and sum(taken) < _SECONDS:
        taken.append(measure(implementation, problem))
    return statistics.median(taken)


def first_mismatch(found: Results, expected: Results) -> str | None:
    """Returns what differs from `fast` by more than rounding, or `None`."""
    for name, e in expected.items():
        f = found[name]
        if e is None or f is None or not e.numel():
            continue
        allowed = _TOLERANCES.get(e.dtype, 1e-6) * e.abs().max()
        if not bool((f - e).abs().max() <= allowed):
            return f"{name} differs from that of fast"
    return None


def _seconds(implementation: Implementation, problem: Problem) -> float:
    start = time.perf_counter()
    run(implementation.attention, problem)
    return time.perf_counter() - start


def _cuda_seconds(implementation: Implementation, problem: Problem) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run(implementation.attention, problem)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000
