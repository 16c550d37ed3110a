"""Tails of a distribution of KL, and flips."""

from __future__ import annotations

import numpy as np
import pytest

from quantkit.evaluation.quality.token_scores import TokenScores, joined, tails


def scores(kl, agrees):
    kl, agrees = np.asarray(kl, np.float32), np.asarray(agrees, bool)
    return TokenScores(kl, np.zeros_like(kl), np.zeros(kl.shape, np.int32), agrees)


def test_percentiles_and_flips():
    kl = np.arange(1000.0).reshape(10, 100)
    agrees = np.ones((10, 100), bool)
    agrees[:, :7] = False
    tail_values = tails(scores(kl, agrees))
    assert tail_values["kl_median"].value == pytest.approx(499.5)
    assert tail_values["kl_p99"].value == pytest.approx(989.01)
    assert tail_values["kl_p999"].value == pytest.approx(998.001)
    assert tail_values["flips"].value == pytest.approx(0.07)
    # each window has as many
    assert tail_values["flips"].low == tail_values["flips"].high == pytest.approx(0.07)
    for interval in tail_values.values():
        assert interval.low <= interval.value <= interval.high
    assert tail_values["kl_median"].low < 499.5 < tail_values["kl_median"].high


def test_what_is_left_of_rounding_counts_as_nothing():
    tail_values = tails(scores([[-1e-9, -2e-9, 0.0, 0.0]], [[True] * 4]))
    assert tail_values["kl_median"].value == tail_values["kl_p999"].value == 0


def test_texts_are_joined():
    together = joined([scores([[1, 2]], [[1, 0]]), scores([[3, 4], [5, 6]], [[1, 1], [0, 0]])])
    assert together.kl.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert tails(together)["flips"].value == pytest.approx(0.5)


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    random = np.random.default_rng(0)
    inside = 0
    for seed in range(60):
        kl = random.exponential(1.0, (40, 50))
        interval = tails(scores(kl, np.ones((40, 50), bool)), seed)["kl_median"]
        inside += interval.low <= np.log(2) <= interval.high
    assert 50 <= inside <= 60
