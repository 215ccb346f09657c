"""What the process for proofs does: it answers tasks until there are no more."""

import json
import os
import sys
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch

from irpe.core.bucket_map import BucketMap, KeyAxis
from irpe.ops.proof.judge import Answer, Implementation, Results, judge, run
from irpe.ops.proof.problem import Problem, Sizes, random_problem
from irpe.ops.proof.signature import Signature
from irpe.ops.proof.timing import first_mismatch, seconds_of


class Task(NamedTuple):
    """What is asked about a candidate: a proof, or with sizes its time.

    Args:
        module: The candidate: its module, or "module:class".
        signature: Its fields.
        device: Where it runs.
        deterministic: Whether PyTorch's deterministic algorithms are in use.
        sizes: The sizes of the call to time.
        maps: The file of its bucket maps: see `save_maps`.
        fallback: The same of `fast`, which candidates are compared with at these sizes.
    """

    module: str
    signature: tuple[Any, ...]
    device: str
    deterministic: bool = False
    sizes: tuple[int, int, int, int] | None = None
    maps: str = ""
    fallback: str = ""


def save_maps(maps: tuple[BucketMap, ...], path: Path) -> None:
    """Writes bucket maps to a file that `serve` reads."""
    torch.save(
        [(m.compact_ids.cpu(), m.num_used_buckets, m.key_axis and tuple(m.key_axis)) for m in maps],
        path,
    )


def serve() -> None:
    """Answers tasks, each a line of JSON. What a candidate prints goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print("ready", file=answers, flush=True)
    server = _Server()
    for line in sys.stdin:
        answer = server.answer(Task(**json.loads(line)))
        print(json.dumps(answer._asdict()), file=answers, flush=True)


class _Server:
    """Answers tasks; it keeps the last problem of real size, with what `fast` gave for it."""

    def __init__(self) -> None:
        self._of: tuple[object, ...] = ()
        self._problem: Problem | None = None
        self._expected: Results = {}

    def answer(self, task: Task) -> Answer:
        torch.use_deterministic_algorithms(task.deterministic, warn_only=True)
        signature, device = Signature(*task.signature), torch.device(task.device)
        torch.backends.cuda.matmul.allow_tf32 = signature.tf32
        try:
            implementation = resolve_name(task.module)
            if task.sizes is None:
                return judge(implementation, signature, device)
            return self._time(implementation, signature, device, task)
        except (torch.OutOfMemoryError, MemoryError):
            return Answer("out of memory", is_lasting=False)
        except Exception as error:  # whatever a candidate raises is its failure
            return Answer(f"{type(error).__name__}: {error}"[:2000])

    def _time(
        self, implementation: Implementation, signature: Signature, device: torch.device, task: Task
    ) -> Answer:
        assert task.sizes is not None
        if self._of != (signature, task.sizes, task.maps):
            kept = torch.load(task.maps, weights_only=True)
            maps = [
                BucketMap.of_rows_in_use(ids, count, axis and KeyAxis(*axis))
                for ids, count, axis in kept
            ]
            self._problem = random_problem(signature, Sizes(*task.sizes), maps, device)
            self._expected = {}
            self._of = (signature, task.sizes, task.maps)
            fallback = resolve_name(task.fallback)
            self._expected = run(fallback.attention, self._problem.without_dropout())
        assert self._problem is not None
        found = run(implementation.attention, self._problem.without_dropout())
        error = first_mismatch(found, self._expected)
        del found
        if error is not None:
            return Answer(f"{error}, at {Sizes(*task.sizes)}")
        return Answer(seconds=seconds_of(implementation, self._problem))
