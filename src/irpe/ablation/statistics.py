"""Rows with all their seeds: means, errors, and which differences the data supports."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from irpe.ablation.cells import At, CellResult
from irpe.ablation.costs import RowCost
from irpe.ablation.rows import AblationRow
from irpe.ablation.verdicts import Difference, judge, probabilities_of_best, seeds_to_settle
from irpe.adapters.effect import NEXT_TO_NOTHING
from irpe.train.task import Measure


@dataclass(frozen=True)
class RowResult:
    """A row with all its seeds."""

    name: str
    results: tuple[CellResult, ...]  # one for each seed
    cost: RowCost
    row: AblationRow

    @property
    def measure(self) -> Measure:
        """What is compared."""
        return self.results[0].scores[0].measure

    @property
    def digits(self) -> int:
        """How many digits after the point a mean score is worth."""
        return digits_of(self.measure)

    @property
    def shifts(self) -> tuple[int, ...]:
        """How far test images are moved, in patches; 0 is the image as it is."""
        return self.results[0].shifts

    @property
    def sizes(self) -> tuple[str, ...]:
        """The other sizes of the input that every seed was evaluated at."""
        return tuple(s for s in self.results[0].sizes if all(s in r.sizes for r in self.results))

    def scores(self, shift: At = 0) -> list[float]:
        """Returns the score of each seed."""
        return [result.score(shift).value for result in self.results]

    def mean(self, shift: At = 0) -> float:
        """Returns the mean score over the seeds."""
        return statistics.fmean(self.scores(shift))

    def merit(self, shift: At = 0) -> float:
        """Returns the mean score, turned so that more is better."""
        return self.mean(shift) if self.measure.higher_is_better else -self.mean(shift)

    def spread(self, shift: At = 0) -> float | None:
        """Returns half the distance between the best and the worst seed; `None` for one seed."""
        scores = self.scores(shift)
        return (max(scores) - min(scores)) / 2 if len(scores) > 1 else None

    def values(self, shift: At = 0) -> np.ndarray:
        """Returns the value of each test image, the mean over the seeds; empty without any."""
        values = [result.score(shift).values for result in self.results]
        if len({len(of_seed) for of_seed in values}) > 1:  # an image became unreadable
            return np.empty(0)
        return np.mean(values, axis=0) if values[0] else np.empty(0)

    def error(self, shift: At = 0) -> float | None:
        """Returns the standard error of the mean over the test images, if they have values."""
        values = self.values(shift)
        return _error(values) if len(values) > 1 else None

    @property
    def effect(self) -> float | None:
        """How much the attention's output changes without the encoding: the mean over the seeds."""
        found = [result.effect for result in self.results if result.effect is not None]
        return statistics.fmean(found) if found else None

    @property
    def is_idle(self) -> bool:
        """Whether the row has an encoding that did next to nothing."""
        return self.effect is not None and self.effect < NEXT_TO_NOTHING

    @property
    def chance(self) -> float | None:
        """The score of the best answer that does not look at the image, if known."""
        return self.results[0].scores[0].chance

    @property
    def is_at_chance(self) -> bool:
        """Whether a seed is not clearly better than chance, by two standard errors over images."""
        if self.chance is None:
            return False
        margin = 2 * (self.error() or 0.0)
        if self.measure.higher_is_better:
            return min(self.scores()) <= self.chance + margin
        return max(self.scores()) >= self.chance - margin

    @property
    def seconds(self) -> float | None:
        """How long a cell took, the median over the seeds that were not interrupted."""
        found = [result.seconds for result in self.results if result.seconds is not None]
        return statistics.median(found) if found else None

    def text(self, shift: At = 0) -> str:
        """Returns the mean, ± the spread of the seeds, in brackets the error over the images."""
        spread, error, digits = self.spread(shift), self.error(shift), self.digits
        seeds = "" if spread is None else f"±{spread:.{digits}f}"
        images = "" if error is None else f" ({error:.{digits}f})"
        return f"{self.mean(shift):.{digits}f}{seeds}{images}"


def collect_rows(
    rows: Sequence[AblationRow], results: Sequence[CellResult], costs: Mapping[str, RowCost]
) -> list[RowResult]:
    """Returns the results by row; a row without any is left out."""
    found = {row.name: tuple(r for r in results if r.row == row.name) for row in rows}
    return [
        RowResult(row.name, found[row.name], costs[row.name], row)
        for row in rows
        if found[row.name]
    ]


def common_sizes(rows: Sequence[RowResult]) -> list[str]:
    """Returns the other sizes of the input that all rows were evaluated at."""
    return [size for size in rows[0].sizes if all(size in row.sizes for row in rows)]


def unmoved(row: RowResult) -> str:
    """Returns what to call the test images as they are."""
    return "Images as they are" if len(row.shifts) > 1 else f"By {row.measure.name}"


def digits_of(measure: Measure) -> int:
    """Returns how many digits after the point a mean of some seeds is worth."""
    return 1 if measure.unit == "%" else measure.digits


def compare(row: RowResult, other: RowResult, shift: At = 0) -> Difference:
    """Returns how much better a row is than another, with its interval and verdict."""
    error, count = paired_error(row, other, shift)
    higher = row.measure.higher_is_better
    return judge(row.scores(shift), other.scores(shift), error, count, higher)


def paired_error(row: RowResult, other: RowResult, shift: At = 0) -> tuple[float, int]:
    """Returns the standard error of a difference over the test images, and their number."""
    own, others = row.values(shift), other.values(shift)
    if len(own) == len(others):
        return (_error(own - others), len(own)) if len(own) > 1 else (0.0, 0)
    errors = (row.error(shift) or 0.0, other.error(shift) or 0.0)
    return math.hypot(*errors), min(len(own), len(others))


def find_seeds(row: RowResult, other: RowResult) -> int | None:
    """Returns how many seeds each would settle a tie of two rows; `None`: too many."""
    return seeds_to_settle(row.scores(), other.scores(), *paired_error(row, other))


def find_probabilities(rows: Sequence[RowResult]) -> list[float]:
    """Returns how probable it is that each of these rows, with two seeds at least, is the best."""
    sign = 1 if rows[0].measure.higher_is_better else -1
    values = [row.values() for row in rows]
    covariance = np.zeros((len(rows), len(rows)))
    if len({len(of_row) for of_row in values}) == 1 and len(values[0]) > 1:
        covariance = np.atleast_2d(np.cov(np.stack(values))) / len(values[0])
    return probabilities_of_best([[sign * s for s in row.scores()] for row in rows], covariance)


def _error(values: np.ndarray) -> float:
    return float(values.std(ddof=1)) / math.sqrt(len(values))
