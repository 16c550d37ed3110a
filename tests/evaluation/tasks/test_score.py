"""Scores and their intervals against values worked out elsewhere."""

import math

import numpy as np
import pytest

from quantkit.evaluation.tasks.score import score, wilson


@pytest.mark.parametrize(("right", "items", "low", "high"), [
    (8, 10, 0.4901625, 0.9433178), (0, 10, 0.0, 0.2775328), (10, 10, 0.7224672, 1.0),
    (120, 200, None, None)])
def test_wilson(right, items, low, high):
    found = wilson(right, items)
    assert found.value == right / items
    if low is not None:
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-6)
    for end in (found.low, found.high):  # what defines it: z standard deviations from what was seen
        if 0 < end < 1:
            deviations = abs(found.value - end) / math.sqrt(end * (1 - end) / items)
            assert deviations == pytest.approx(1.959964, abs=1e-4)


def test_shares():
    found = score("acc", [1.0, 0.0, 1.0, 1.0])
    assert found == wilson(3, 4) == score("exact_match", [1, 1, 0, np.float64(1)])


def test_perplexity_of_equal_items_is_exact():
    found = score("perplexity", [-2.0] * 7)
    assert found.value == found.low == found.high == pytest.approx(math.exp(2))


def test_ratios_are_weighted_by_length():
    values = [(-10.0, 4), (-2.0, 1), (-30.0, 10)]
    assert score("word_perplexity", values).value == pytest.approx(math.exp(42 / 15))
    assert score("byte_perplexity", values).value == pytest.approx(math.exp(42 / 15))
    assert score("bits_per_byte", values).value == pytest.approx(42 / 15 / math.log(2))


def test_the_bootstrap_covers_what_it_says():
    random, hits = np.random.default_rng(0), 0
    for _ in range(60):
        found = score("perplexity", list(random.normal(-1.0, 0.5, 80)))
        assert found.low <= found.value <= found.high
        hits += found.low <= math.e <= found.high
    assert 52 <= hits <= 60


def test_many_items_go_in_blocks(monkeypatch):
    values = list(np.random.default_rng(1).normal(-1, 1, 500))
    whole = score("perplexity", values)
    monkeypatch.setattr("quantkit.evaluation.tasks.score._BLOCK", 1700)
    parts = score("perplexity", values)
    assert whole.value == parts.value and parts.low == pytest.approx(whole.low, rel=0.02)


def test_hopeless_models_and_no_items():
    assert score("perplexity", [-2000.0] * 3).value == math.inf
    with pytest.raises(ValueError, match="no items"):
        score("acc", [])
