"""Paired comparisons against their definitions."""

import pytest

from quantkit.evaluation.long.paired_test import AnswerPair, compare


def test_it_counts_what_was_lost_and_gained():
    found = compare([AnswerPair(0, True, False, -3.0), AnswerPair(0, True, True, -1.0),
                     AnswerPair(1, False, True, 1.0), AnswerPair(1, False, False, 0.0),
                     AnswerPair(2, True, False, -4.0)])
    assert (found.asked, found.full, found.own, found.lost, found.gained) == (5, 3, 2, 2, 1)
    assert found.change.value == pytest.approx((-2.0 + 0.5 - 4.0) / 3), "contexts weigh alike"
    assert found.change.low < found.change.value < found.change.high


def test_questions_about_one_context_don_t_narrow_the_interval():
    once = compare([AnswerPair(context, True, True, change)
                    for context, change in enumerate((-1.0, 0.0, 2.0))])
    often = compare([AnswerPair(context, True, True, change)
                     for context, change in enumerate((-1.0, 0.0, 2.0))
                     for _ in range(50)])
    assert often.change == once.change
    with pytest.raises(ValueError):
        compare([])
