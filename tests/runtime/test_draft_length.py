"""How long drafts are, by what was timed."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import ClassVar

import pytest

from quantkit.runtime import speculation
from quantkit.runtime.drafting.base import Drafter, DraftSource
from quantkit.runtime.engine import Engine
from quantkit.runtime.sampler import Sampling


def test_longer_where_more_is_right_and_none_below_break_even():
    times = speculation.StepTimes()
    for _ in range(60):
        for rows in (1, 2, 5, 17):
            times.observe(rows, 1.8 + 0.2 * rows)
    assert times.base_s == pytest.approx(2.0, rel=0.02)
    for rows in (1, 2, 3, 5, 9, 17, 25):  # also those that weren't timed
        assert times.ratio(rows) == pytest.approx(0.9 + 0.1 * rows, rel=0.03)
    lengths = [speculation.best_length(speculation.Acceptance(hits=hits, misses=4), times, 0, 16)
               for hits in (0, 2, 6, 20, 200)]
    assert lengths == sorted(lengths) and lengths[0] == 0 and lengths[-1] == 16
    assert speculation.best_length(speculation.Acceptance(hits=6, misses=4), times, 30, 16) == 0


def test_a_step_that_was_interrupted_counts_little():
    times = speculation.StepTimes()
    for _ in range(50):
        times.observe(1, 1.0)
    times.observe(1, 1000.0)
    assert times.base_s < 1.2


def test_drafting_costs():
    times = speculation.StepTimes()
    times.observe(1, 1.0)
    sure = speculation.Acceptance(hits=19, misses=1)
    free = speculation.best_length(sure, times, 0, 16)
    times.observe_draft(1, 100.0)  # a cold start
    times.observe_draft(4, 4 * 0.5)
    assert 0 < speculation.best_length(sure, times, 0, 16) < free
    for _ in range(20):
        times.observe_draft(4, 4 * 2.0)
    assert speculation.best_length(sure, times, 0, 16) == 0


def test_pauses_grow_until_drafts_pay():
    acceptance = speculation.Acceptance()
    pauses = []
    for _ in range(8):
        assert acceptance.length(0, 1, 8) == 0
        pauses.append(acceptance.pause)
        assert [acceptance.length(0, 2, 8) for _ in range(acceptance.pause)] == [0] * (pauses[-1] - 1) + [2]
        acceptance.observe(2, 1)
    assert pauses == [8, 16, 32, 64, 128, 256, 256, 256]
    assert acceptance.length(5, 1, 8) == 5
    assert acceptance.length(0, 1, 8) == 0 and acceptance.pause == 8


def test_a_try_that_is_right_is_followed_by_longer_ones():
    acceptance = speculation.Acceptance(pause=1)
    drafted = []
    for _ in range(4):
        drafted.append(acceptance.length(0, 1, 6))
        acceptance.observe(drafted[-1], drafted[-1])
    assert drafted == [1, 2, 4, 6]
    assert acceptance.length(0, 1, 6) == 0 and acceptance.pause == 8


def test_trials_are_short_where_drafts_are_dear():
    times = speculation.StepTimes()
    for _ in range(50):
        times.observe(1, 1.0)
        times.observe(2, 1.1)
    assert speculation.trial_length(times, 12) == 4 and speculation.trial_length(times, 2) == 2
    for _ in range(2):
        times.observe_draft(1, 0.7)
    assert speculation.trial_length(times, 12) == 1


@pytest.mark.parametrize("before", [0.6, 1.0, 2.0])
def test_drafts_that_do_not_pay_end_whatever_was_timed_before(before):
    """Every step has drafts but those that :data:`STEPS_BETWEEN` keeps free."""
    times, acceptance, chance, step = speculation.StepTimes(), speculation.Acceptance(), random.Random(1), 0
    for _ in range(20):
        times.observe(1, before)
    times.observe_draft(1, 1.0)  # a cold start
    for step in range(20 * speculation.STEPS_BETWEEN):
        drafted = speculation.best_length(acceptance, times, 0, 8)
        if not drafted:
            break
        if step % speculation.STEPS_BETWEEN:
            times.observe_draft(drafted, drafted * 0.4)
            times.observe(1 + drafted, (1.0 + 0.1 * drafted) * chance.uniform(0.9, 1.1))
            right = 0
            while right < drafted and chance.random() < 0.5:
                right += 1
            acceptance.observe(drafted, right)
        else:
            times.observe(1, chance.uniform(0.9, 1.1))
    assert step < 8 * speculation.STEPS_BETWEEN


def test_times_of_more_rows_leave_that_of_a_single_row_alone():
    times = speculation.StepTimes()
    times.observe(1, 2.0)
    for _ in range(200):
        times.observe(5, 1.4)
    assert times.base_s == 2.0 and times.ratio(5) == pytest.approx(0.7)
    times.observe(1, 1.0)  # the first in a long time says much
    assert times.base_s == pytest.approx(1.5)
    times.observe(1, 1.5 + 0.2)
    assert times.base_s == pytest.approx(1.5 + 0.2 * speculation.SLOWER)


class Zeros(Drafter):
    """Drafts a token in every step."""

    name: ClassVar[str] = "zeros"

    def start(self, target):
        return ZeroSource()


class ZeroSource(DraftSource):
    def propose(self, texts, limits):
        return [[0] for _ in texts]


def test_now_and_then_a_step_goes_without_a_draft(small, prompt_of, monkeypatch):
    monkeypatch.setattr(speculation, "best_length", lambda acceptance, times, others, limit: limit)
    engine, rows = Engine(small, drafter=Zeros()), []
    monkeypatch.setattr(engine.speculator.times, "observe", lambda count, seconds: rows.append(count))
    engine.submit(prompt_of(9), Sampling(max_tokens=200, ignore_eos=True))
    while engine.step():
        pass
    engine.close()
    free = [index for index, count in enumerate(rows) if count == 1]
    assert len(rows) > 2 * speculation.STEPS_BETWEEN
    assert {later - earlier for earlier, later in pairwise(free[:-1])} == {1 + speculation.STEPS_BETWEEN}
