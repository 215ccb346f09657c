"""Which differences between the rows of an ablation the data supports."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from irpe.ablation.cells import CellResult, RowCost

Verdict = Literal["better", "worse", "tie", "unknown"]


@dataclass(frozen=True)
class RowResult:
    """A row with all its seeds.

    Args:
        name: Its name.
        results: One for each seed.
        cost: What it costs.
    """

    name: str
    results: tuple[CellResult, ...]
    cost: RowCost

    def mean(self, shift: int = 0) -> float:
        """Returns the mean top-1 over the seeds."""
        return statistics.mean(result.top1(shift) for result in self.results)

    def spread(self, shift: int = 0) -> float:
        """Returns half the distance between the best and the worst seed."""
        return half_range([result.top1(shift) for result in self.results])


def collect_rows(results: Sequence[CellResult], costs: Mapping[str, RowCost]) -> list[RowResult]:
    """Returns the results by row, in the order in which the rows occur."""
    names = dict.fromkeys(result.row for result in results)
    return [
        RowResult(name, tuple(result for result in results if result.row == name), costs[name])
        for name in names
    ]


def half_range(scores: Sequence[float]) -> float:
    """Returns half the distance between the best and the worst score."""
    return (max(scores) - min(scores)) / 2


def compare(row: RowResult, other: RowResult, shift: int = 0) -> Verdict:
    """Returns "better", "worse" or "tie", and "unknown" where there is one seed only.

    Two rows differ if every seed of one beats every seed of the other, and if their mean difference
    on the test images is more than twice its standard error over these images.
    """
    if min(len(row.results), len(other.results)) < 2:
        return "unknown"
    own = [result.top1(shift) for result in row.results]
    others = [result.top1(shift) for result in other.results]
    difference, error = _paired_difference(row, other, shift)
    if abs(difference) <= 2 * error:
        return "tie"
    if min(own) > max(others):
        return "better"
    return "worse" if max(own) < min(others) else "tie"


def _paired_difference(row: RowResult, other: RowResult, shift: int) -> tuple[float, float]:
    """Returns the mean difference in percent, image by image, and its standard error."""

    def rates(of: RowResult) -> Tensor:
        correct = [result.correct[shift] for result in of.results]
        return torch.tensor(correct, dtype=torch.float64).mean(0)

    differences = 100 * (rates(row) - rates(other))
    return differences.mean().item(), differences.std().item() / math.sqrt(len(differences))
