"""The rule of a verdict: its error rate, and what it is made of."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from irpe.ablation.verdicts import adjust, judge, probabilities_of_best, seeds_to_settle

SCORES = st.lists(st.floats(0, 100), min_size=2, max_size=6)


@settings(deadline=None)
@given(SCORES, SCORES)
def test_without_noise_of_images_it_is_welchs_test(own, other):
    if min(statistics.pvariance(own), statistics.pvariance(other)) < 1e-6:
        return
    found = judge(own, other, 0.0, 100)
    expected = stats.ttest_ind(own, other, equal_var=False)
    interval = expected.confidence_interval()
    assert found.p_value == pytest.approx(expected.pvalue, abs=1e-9)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


@settings(deadline=None)
@given(st.floats(-5, 5), st.floats(0.1, 3), st.integers(30, 10_000))
def test_without_noise_of_seeds_it_is_the_test_over_the_images(value, error, images):
    found = judge([50 + value] * 3, [50.0] * 2, error, images)
    half = stats.t.ppf(0.975, images - 1) * error
    assert (found.low, found.high) == pytest.approx((value - half, value + half))


@settings(deadline=None)
@given(SCORES, SCORES, st.floats(0, 3))
def test_the_two_sides_agree(own, other, error):
    forward, backward = judge(own, other, error, 500), judge(other, own, error, 500)
    opposite = {"better": "worse", "worse": "better", "tie": "tie"}
    assert backward.verdict == opposite[forward.verdict]
    assert backward.p_value == pytest.approx(forward.p_value)


def test_one_seed_cannot_tell():
    found = judge([90.0], [10.0, 11.0], 0.1, 1000)
    assert (found.verdict, found.value, found.low) == ("unknown", 79.5, -math.inf)


@pytest.mark.parametrize("seeds", [2, 4])
@pytest.mark.parametrize(("seed_noise", "image_noise"), [(1.4, 0.5), (0.6, 0.65), (4.0, 0.7)])
def test_equal_rows_are_called_better_in_at_most_one_of_twenty(seeds, seed_noise, image_noise):
    """The whole measurement is `python -m benchmarks.verdicts`."""
    random, draws, wrong, found = np.random.default_rng(seeds), 1000, 0, 0
    for _ in range(draws):
        own, other = random.normal(0, seed_noise, (2, seeds))
        shift = random.normal(0, image_noise)
        wrong += judge(own + shift, other, image_noise, 2000).verdict == "better"
        found += judge(own + shift + 12 * seed_noise, other, image_noise, 2000).verdict == "better"
    assert wrong <= 0.05 * draws
    assert found >= 0.75 * draws


def test_p_values_of_many_comparisons_by_holm():
    assert adjust([0.01, 0.04, 0.03, 0.9]) == pytest.approx([0.04, 0.09, 0.09, 0.9])
    assert adjust([]) == []


def test_the_seeds_that_settle_a_tie():
    own, other = [61.0, 63.0], [60.0, 62.0]
    assert judge(own, other, 0.2, 2000).verdict == "tie"
    seeds = seeds_to_settle(own, other, 0.2, 2000)
    assert seeds is not None
    half = stats.t.ppf(0.975, 2 * (seeds - 1)) * math.sqrt(2 * 2 / seeds)
    assert half == pytest.approx(1.0, rel=0.15)
    assert seeds_to_settle(own, other, 0.9, 2000) is None  # only more images could
    assert seeds_to_settle(own, own, 0.2, 2000) is None


def test_the_probability_of_being_best():
    none = np.zeros((3, 3))
    sure = probabilities_of_best([[10, 11], [60, 61], [20, 21]], none)
    assert sure[1] > 0.99
    even = probabilities_of_best([[60, 62], [61, 63], [61.5, 62.5]], np.eye(3))
    assert sum(even) == pytest.approx(1)
    assert all(0.1 < p < 0.6 for p in even)
    together = np.full((3, 3), 100.0)  # images that are hard for all rows alike decide nothing
    assert probabilities_of_best([[10, 11], [60, 61], [20, 21]], together)[1] > 0.99
