"""Words for how much a difference means."""

import math

import pytest

from quantkit.evaluation.effect import NATS, SHARES, WORDS, differs, effect_of, effect_of_row
from quantkit.evaluation.metrics import Interval
from quantkit.evaluation.result import ModelResult


@pytest.mark.parametrize(("high", "word"), [
    (0.0, "negligible"), (0.0031, "negligible"), (0.01, "small"), (0.09, "small"), (0.25, "visible"),
    (0.5, "broken"), (math.inf, "broken")])
def test_a_word_by_the_worse_end_of_kl(high, word):
    assert effect_of("kl_mean", 0.0, high) == word


def test_shares_and_other_metrics():
    assert effect_of("flips", 0.0, 0.03) == effect_of("top1", -0.03, 0.0) == "negligible"
    assert effect_of("flips", 0.0, 0.45) == "broken" and effect_of("arc_easy/acc", -0.5, 0.0) is None
    assert effect_of("kl_mean", math.nan, math.nan) is None
    assert len(NATS) == len(SHARES) == len(WORDS) - 1


def test_of_a_row_by_kl_and_else_by_the_likeliest_token():
    row = ModelResult("m", "int8", 8.0, 1, metrics={"top1": Interval(0.97, 0.96, 0.98)})
    assert effect_of_row(row) == "negligible"
    row.metrics["kl_mean"] = Interval(0.2, 0.1, 0.3)
    assert effect_of_row(row) == "visible"
    assert effect_of_row(ModelResult("m", "int8", 8.0, 1)) is None


def test_speeds_differ_if_their_ranges_do_not_meet():
    assert differs(Interval(10, 9, 11), Interval(13, 12, 14))
    assert not differs(Interval(10, 9, 12), Interval(13, 11, 14))
    assert not differs(Interval(10, 10, 10), Interval(13, 12, 14)), "of one run nothing is known"
    assert not differs(None, Interval(13, 12, 14))
