"""The rule of a verdict: seeds and test images taken together, with a known error rate.

A score varies with the seed of a training and with the choice of test images. The interval of a
difference is Welch's t interval with three variances: that of the seeds of either row, and that of
the paired difference over the test images (`python -m benchmarks.verdicts` measures how often it is
wrong). It needs no more than scores of seeds and a standard error over the images.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Literal

import numpy as np
from scipy import special

Verdict = Literal["better", "worse", "tie", "unknown"]
CONFIDENCE = 0.95
MOST_SEEDS = 30  # that are ever recommended
SEEDS_FOR_HOLM = 3  # with two, small p-values are too small


@dataclass(frozen=True)
class Difference:
    """The difference between two means, with its interval.

    Args:
        value: The difference.
        low: The lower end of its 95 % interval.
        high: The upper end.
        p_value: How often chance alone gives such a difference, of either sign.
        seeds: The number of seeds of each, the smaller one of the two.
        higher_is_better: Whether more is better.

    Examples:
        >>> from irpe.ablation.verdicts import judge
        >>> judge([75.2, 74.1, 76.0], [71.0, 70.2, 71.9], image_error=0.6, images=2000).verdict
        'better'
    """

    value: float
    low: float
    high: float
    p_value: float
    seeds: int
    higher_is_better: bool = True

    @property
    def verdict(self) -> Verdict:
        """Whether the interval leaves 0 out; one seed cannot tell."""
        if self.seeds < 2:
            return "unknown"
        if self.low <= 0 <= self.high:
            return "tie"
        return "better" if (self.value > 0) == self.higher_is_better else "worse"

    @property
    def gain(self) -> float:
        """How much better it is: the difference, turned so that more is better."""
        return self.value if self.higher_is_better else -self.value

    def text(self, digits: int = 1) -> str:
        """Returns the difference ± half the width of its interval."""
        if self.seeds < 2:
            return f"{self.value:+.{digits}f}"
        return f"{self.value:+.{digits}f} ± {(self.high - self.low) / 2:.{digits}f}"

    def __str__(self) -> str:
        return self.text()


def judge(
    own: Sequence[float],
    other: Sequence[float],
    image_error: float,
    images: int,
    higher_is_better: bool = True,
) -> Difference:
    """Returns how much better some scores are than others, both with one for each seed.

    `image_error` is the standard error of the difference of the means over that many test images.
    """
    value, seeds = fmean(own) - fmean(other), min(len(own), len(other))
    if seeds < 2:
        return Difference(value, -math.inf, math.inf, 1.0, seeds, higher_is_better)
    parts = [(variance(scores) / len(scores), len(scores) - 1) for scores in (own, other)]
    half, p_value = _interval(value, [*parts, (image_error**2, max(images - 1, 1))])
    return Difference(value, value - half, value + half, p_value, seeds, higher_is_better)


def seeds_to_settle(
    own: Sequence[float], other: Sequence[float], image_error: float, images: int
) -> int | None:
    """Returns how many seeds would settle a tie, if means and noise stay as they are.

    `None`: `MOST_SEEDS` are too few, as seeds do not reduce `image_error`; then more test images,
    or nothing, would settle it.
    """
    value = abs(fmean(own) - fmean(other))
    for seeds in range(max(len(own), len(other)) + 1, MOST_SEEDS + 1):
        parts = [(variance(x) / seeds, seeds - 1) for x in (own, other)]
        if _interval(value, [*parts, (image_error**2, max(images - 1, 1))])[0] < value:
            return seeds
    return None


def adjust(p_values: Sequence[float]) -> list[float]:
    """Returns p-values for all comparisons together, by Holm's method."""
    order = np.argsort(p_values, kind="stable")
    factors = np.arange(len(p_values), 0, -1)
    stepped = np.maximum.accumulate(np.asarray(p_values)[order] * factors).clip(max=1.0)
    adjusted = np.empty(len(p_values))
    adjusted[order] = stepped
    return adjusted.tolist()


def probabilities_of_best(
    scores: Sequence[Sequence[float]], covariance: np.ndarray, draws: int = 20_000
) -> list[float]:
    """Returns how probable it is that each row, a score for each seed, has the highest expectation.

    The seeds of all rows are taken to vary alike, so that two of each are enough for an estimate.
    """
    freedom = sum(len(row) - 1 for row in scores)
    pooled = sum(variance(row) * (len(row) - 1) for row in scores if len(row) > 1) / freedom
    noise = np.random.default_rng(0)
    of_seeds = np.diag([pooled / len(row) for row in scores])
    drawn = noise.multivariate_normal(np.zeros(len(scores)), of_seeds + covariance, size=draws)
    drawn *= np.sqrt(freedom / noise.chisquare(freedom, size=(draws, 1)))
    best = (drawn + [fmean(row) for row in scores]).argmax(1)
    return (np.bincount(best, minlength=len(scores)) / draws).tolist()


def _interval(value: float, parts: Sequence[tuple[float, int]]) -> tuple[float, float]:
    """Returns half the width of an interval, and the p-value (Welch and Satterthwaite)."""
    total = sum(part for part, _ in parts)
    if total == 0:
        return 0.0, float(value == 0)
    freedom = 1 / sum((part / total) ** 2 / degrees for part, degrees in parts)
    error = math.sqrt(total)
    half = error * float(special.stdtrit(freedom, (1 + CONFIDENCE) / 2))
    return half, 2 * float(special.stdtr(freedom, -abs(value) / error))
