"""Which differences between the rows of an ablation the data supports."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from irpe.ablation.costs import RowCost
from irpe.ablation.results import CellResult, Measure
from irpe.ablation.rows import AblationRow
from irpe.adapters.effect import NEXT_TO_NOTHING

Verdict = Literal["better", "worse", "tie", "unknown"]


@dataclass(frozen=True)
class RowResult:
    """A row with all its seeds.

    Args:
        name: Its name.
        results: One for each seed.
        cost: What it costs.
        row: What it is.
    """

    name: str
    results: tuple[CellResult, ...]
    cost: RowCost
    row: AblationRow

    def mean(self, shift: int = 0) -> float:
        """Returns the mean score over the seeds."""
        return statistics.mean(result.score(shift) for result in self.results)

    def spread(self, shift: int = 0) -> float | None:
        """Returns half the distance between the best and the worst seed; `None` for one seed."""
        scores = [result.score(shift) for result in self.results]
        return half_range(scores) if len(scores) > 1 else None

    def error(self, shift: int = 0) -> float:
        """Returns the standard error of the mean over the test images, in percent."""
        return _mean_and_error(_values(self, shift))[1]

    @property
    def measure(self) -> Measure:
        """What is compared."""
        return self.results[0].measure

    @property
    def effect(self) -> float | None:
        """How much the attention's output changes without the encoding: the mean over the seeds."""
        found = [result.effect for result in self.results if result.effect is not None]
        return statistics.mean(found) if found else None

    @property
    def is_idle(self) -> bool:
        """Whether the row has an encoding that did next to nothing."""
        return self.effect is not None and self.effect < NEXT_TO_NOTHING

    def text(self, shift: int = 0) -> str:
        """Returns the mean, ± the spread of the seeds, in brackets the error over the images."""
        spread = self.spread(shift)
        seeds = "" if spread is None else f"±{spread:.1f}"
        return f"{self.mean(shift):.1f}{seeds} ({self.error(shift):.1f})"


def collect_rows(
    rows: Sequence[AblationRow], results: Sequence[CellResult], costs: Mapping[str, RowCost]
) -> list[RowResult]:
    """Returns the results by row; a row without any is left out.

    Args:
        rows: The rows.
        results: What their cells found.
        costs: What the rows cost, by name.
    """
    found = {row.name: tuple(r for r in results if r.row == row.name) for row in rows}
    return [
        RowResult(row.name, found[row.name], costs[row.name], row)
        for row in rows
        if found[row.name]
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
    own = [result.score(shift) for result in row.results]
    others = [result.score(shift) for result in other.results]
    difference, error = paired_difference(row, other, shift)
    if abs(difference) <= 2 * error:
        return "tie"
    if min(own) > max(others):
        return "better"
    return "worse" if max(own) < min(others) else "tie"


def paired_difference(row: RowResult, other: RowResult, shift: int = 0) -> tuple[float, float]:
    """Returns the mean difference in percent, image by image, and its standard error."""
    return _mean_and_error(_values(row, shift) - _values(other, shift))


def difference(row: RowResult, reference: RowResult, shift: int = 0) -> str:
    """Returns how much better a row is, ± twice the standard error over the test images."""
    mean, error = paired_difference(row, reference, shift)
    return f"{mean:+.1f} ± {2 * error:.1f}"


def _values(row: RowResult, shift: int) -> Tensor:
    """Returns the value of each test image, the mean over the seeds."""
    return torch.stack([result.values(shift) for result in row.results]).mean(0)


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    return values.mean().item(), values.std().item() / math.sqrt(len(values))
