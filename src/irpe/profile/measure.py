"""Time and memory of a forward pass on the CPU."""

import gc
import time
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def interleaved(
    contestants: dict[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Returns the shortest time of each contestant in seconds; they take turns.

    Args:
        contestants: What to run, by name.
        rounds: How many turns each one gets; one more comes first and does not count.
        clock: Returns the time; that of the process alone suits one thread on a busy machine.
    """
    best = dict.fromkeys(contestants, float("inf"))
    for number in range(rounds + 1):
        for name, run in contestants.items():
            start = clock()
            run()
            if number:
                best[name] = min(best[name], clock() - start)
    return best


def peak_memory(run: Callable[[], object]) -> int:
    """Returns the bytes of all tensors that are made and alive at once, at most, while this runs.

    What exists before is not counted: weights, inputs and, after a first run, bucket maps. Nothing
    is sampled: PyTorch's allocator reports every allocation, so the number does not vary.
    """
    gc.collect()  # else garbage from before may be freed meanwhile, which would be reported, too
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    recorded: Any = profiler.profiler
    events = [e for e in recorded.kineto_results.events() if e.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak
