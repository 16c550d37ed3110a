"""Intervals and tests for pairs: known values, and how often they are right on simulated data."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.paired_statistics import (
    EQUIVALENCE,
    mcnemar,
    newcombe,
    percentile_interval,
    resampled_means,
    sign_flips,
    unpaired,
)


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 0), (0, 4), (5, 0), (6, 1), (3, 3), (2, 9)])
def test_mcnemar_is_the_share_of_all_coin_tosses_that_are_as_uneven(lost, gained):
    tosses = list(itertools.product((0, 1), repeat=lost + gained))
    uneven = [abs(2 * sum(toss) - len(toss)) >= abs(lost - gained) for toss in tosses]
    assert mcnemar(lost, gained) == pytest.approx(sum(uneven) / len(uneven))
    assert mcnemar(lost, gained) == mcnemar(gained, lost)


def test_mcnemar_is_the_binomial_test():
    assert mcnemar(12, 2) == pytest.approx(stats.binomtest(2, 14).pvalue)


@pytest.mark.parametrize(("cells", "ends"), [
    # table III of Newcombe 1998, method 10, with the second share less the first
    ((36, 12, 2, 0), (-0.3404, -0.0569)), ((53, 0, 0, 1), (-0.0728, 0.0728))])
def test_newcombes_interval_is_that_of_his_paper(cells, ends):
    assert newcombe(*cells) == pytest.approx(ends, abs=2e-4)


def test_newcombes_interval_turns_with_the_sides_and_narrows_with_confidence_and_items():
    low, high = newcombe(40, 9, 3, 8)
    assert newcombe(40, 3, 9, 8) == pytest.approx((-high, -low))
    inner = newcombe(40, 9, 3, 8, EQUIVALENCE)
    assert low < inner[0] < inner[1] < high
    assert np.ptp(newcombe(400, 90, 30, 80)) < (high - low) / 2
    low, high = newcombe(0, 0, 0, 20)
    assert low == pytest.approx(-high) and high > 0.1, "no answer is right, and still nothing is certain"


def test_newcombes_interval_covers_the_truth():
    random = np.random.default_rng(7)
    shares = (0.55, 0.06, 0.03, 0.36)
    tables = random.multinomial(120, shares, 1500)
    ends = [newcombe(*map(int, cells)) for cells in tables]
    covered = np.mean([low <= shares[2] - shares[1] <= high for low, high in ends])
    assert 0.94 <= covered <= 0.99  # it is a little conservative; the simulation's error is 0.006


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("pairs", "texts"), [(8, 1), (16, 1), (40, 1), (10, 4)])
def test_the_bootstrap_covers_the_truth_of_skewed_differences(pairs, texts):
    random = np.random.default_rng(11)
    covered = 0
    runs = 600
    for run in range(runs):
        # texts with means of their own: the truth is the mean over all windows
        strata = [random.gamma(4, 0.25, pairs) + text for text in range(texts)]
        values = np.concatenate(strata)
        low, high = percentile_interval(resampled_means(strata, run), values.mean(), len(values) - texts)
        covered += low <= 1 + (texts - 1) / 2 <= high
    assert 0.91 <= covered / runs <= 0.97  # 95% less what skewness costs few windows; error 0.009


def test_a_text_s_own_level_does_not_widen_the_interval():
    random = np.random.default_rng(3)
    strata = [random.normal(level, 0.1, 20) for level in (0, 100)]
    apart = percentile_interval(resampled_means(strata), 50.0, 38)
    mixed = percentile_interval(resampled_means([np.concatenate(strata)]), 50.0, 39)
    assert np.ptp(apart) < 1 < np.ptp(mixed)


def test_few_values_get_the_width_of_students_t():
    values = np.random.default_rng(5).normal(0, 1, 6)
    low, high = percentile_interval(resampled_means([values]), float(values.mean()), 5)
    student = stats.t.interval(0.95, 5, values.mean(), values.std(ddof=1) / math.sqrt(6))
    assert (high - low) == pytest.approx(student[1] - student[0], rel=0.2)
    assert percentile_interval(resampled_means([values[:1]]), 2.0, 0) == (2.0, 2.0)


@pytest.mark.parametrize("alternative", ["two-sided", "greater", "less"])
def test_sign_flips_are_exact_where_all_can_be_tried(alternative):
    values = np.array([0.4, 1.3, -0.2, 2.2, 0.9])
    means = np.array([np.mean(values * signs) for signs in itertools.product((1, -1), repeat=5)])
    above, below = (means >= values.mean() - 1e-12).mean(), (means <= values.mean() + 1e-12).mean()
    expected = {"greater": above, "less": below, "two-sided": min(1, 2 * min(above, below))}
    assert sign_flips(values, alternative) == pytest.approx(expected[alternative])


def test_sign_flips_that_are_drawn_agree_with_students_t_and_with_themselves():
    values = np.random.default_rng(2).normal(0.25, 1, 60)
    p = sign_flips(values)
    assert p == sign_flips(values) and p == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.015)
    assert sign_flips(np.zeros(9)) == 1.0


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("pairs", "runs"), [(8, 1000), (20, 300)])
def test_sign_flips_call_chance_a_difference_no_more_often_than_they_say(pairs, runs):
    random = np.random.default_rng(14)
    rejected = np.mean([sign_flips(random.laplace(0, 1, pairs), seed=run) <= 0.05 for run in range(runs)])
    assert rejected <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    moved = np.mean([sign_flips(random.laplace(4, 1, pairs), seed=run) <= 0.05 for run in range(40)])
    assert moved > 0.9


def test_unpaired_intervals_of_equal_width_add_like_variances():
    change = unpaired(Interval(1.0, 0.7, 1.3), Interval(3.0, 2.6, 3.4))
    assert (change.value, change.low, change.high) == pytest.approx((2.0, 1.5, 2.5))
