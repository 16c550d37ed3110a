"""How many tokens to draft: what makes tokens come fastest, by what was measured; none below break-even.

Only speed depends on these measurements, never a result.
"""

from __future__ import annotations

from dataclasses import dataclass

MEMORY = 0.9
"""How much an observation still counts after the next one."""
FASTER, SLOWER = 0.4, 0.1
"""How much of a time that is expected is what was measured last; a disturbed step only takes longer."""
OUTLIER = 2.0
"""A step that took more than this many times what was expected counts as having taken so long."""
PRIOR = 0.75
"""The part of drafted tokens that is expected to be right before any were checked."""
PRIOR_WEIGHT = 2.0
"""Observations that this counts as."""
FIRST_PAUSE, LONGEST_PAUSE = 8, 256
"""Steps without a draft after one that didn't pay, until the next try; doubled after each."""
TRIAL, TRIAL_COST = 4, 0.5
"""Tokens of a draft that finds out whether drafts pay again, and steps that they may cost. After one that was
right, another of twice its length follows."""
MARGIN = 1.03
"""How many times as fast as without a draft one must promise to be: what is measured is uncertain."""
STEPS_BETWEEN = 64
"""Steps with drafts after which one goes without: only its time shows whether they pay."""
STALE = 0.5
"""How much of the time of a step with one row is what was measured last, if nothing was for that long."""
ROW_COST = 0.12
"""What another row is expected to cost, as a part of a step with one, before it was measured."""


@dataclass
class Acceptance:
    """How often the drafts of a text were right.

    Attributes:
        hits, misses: drafted tokens that were right, and drafts that went wrong, recent ones above all.
        pause: steps until the next try, while drafts don't pay.
        trial: tokens of the next try, if the last one was right; or 0.
    """

    hits: float = PRIOR * PRIOR_WEIGHT
    misses: float = (1 - PRIOR) * PRIOR_WEIGHT
    pause: int = 0
    trial: int = 0
    _next_pause: int = FIRST_PAUSE

    @property
    def rate(self) -> float:
        """Probability that a drafted token is right if those before it were."""
        return self.hits / (self.hits + self.misses)

    def observe(self, drafted: int, accepted: int) -> None:
        """A draft of ``drafted`` tokens was checked, and its first ``accepted`` were right."""
        self.hits = MEMORY * self.hits + accepted
        self.misses = MEMORY * self.misses + (accepted < drafted)
        if accepted < drafted:
            self.trial = 0

    def length(self, best: int, first: int, limit: int) -> int:
        """Tokens of the next draft: ``best``, if that is any; a try has at least ``first``, and at most
        ``limit``."""
        if self.pause:
            self.pause -= 1
            if not self.pause:
                self.trial = first
                return first
        elif best:
            self.trial, self._next_pause = 0, FIRST_PAUSE
            return best
        elif 0 < self.trial < limit:
            self.trial = min(2 * self.trial, limit)
            return self.trial
        else:
            self.trial, self.pause = 0, self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        return 0


class StepTimes:
    """What steps of the model take by their number of rows, and what drafting a token takes.

    Texts grow longer and steps with them, so times are kept as a step of one row and ratios to it. A time
    with more rows changes its ratio alone: if it changed both, either could drift wherever every step has
    drafts.

    Attributes:
        base_s: seconds of a step with one row; 0: none was timed.
        draft_s: seconds to draft a token.
    """

    def __init__(self) -> None:
        self.base_s = self.draft_s = 0.0
        self._ratios = {1: 1.0}
        self._warm = False
        self._since = 0  # steps since one with one row

    def observe(self, rows: int, seconds: float) -> None:
        """A step had ``rows`` rows."""
        expected = self.ratio(rows)
        if not self.base_s:
            self.base_s = seconds / expected
            return
        # one that waited for another process says nothing
        seconds = min(seconds, OUTLIER * self.base_s * expected)
        if rows > 1:
            self._since += 1
            self._ratios[rows] = _towards(expected, seconds / self.base_s)
        else:
            self.base_s = _towards(self.base_s, seconds, at_least=min(STALE, self._since / STEPS_BETWEEN))
            self._since = 0

    def observe_draft(self, tokens: int, seconds: float) -> None:
        """Drafting ``tokens`` tokens took this long. The first time says nothing: it was cold."""
        if not self._warm:
            self._warm = True
            return
        token_s = seconds / tokens
        self.draft_s = _towards(self.draft_s, token_s) if self.draft_s else token_s

    def ratio(self, rows: int) -> float:
        """How often as long as one row this number of rows takes; between numbers that were timed, and beyond
        them, on a line."""
        known = self._ratios
        if rows in known:
            return known[rows]
        below = max(number for number in known if number < rows)
        above = min((number for number in known if number > rows), default=None)
        if above is not None:
            share = (rows - below) / (above - below)
            return known[below] + share * (known[above] - known[below])
        slope = (known[below] - 1) / (below - 1) if below > 1 else ROW_COST
        return known[below] + max(slope, 0.0) * (rows - below)


def _towards(expected: float, seen: float, at_least: float = 0.0) -> float:
    return expected + max(FASTER if seen < expected else SLOWER, at_least) * (seen - expected)


def trial_length(times: StepTimes, limit: int) -> int:
    """The length of a draft that finds out whether drafts pay again: short where they are dear."""
    token = times.ratio(2) - 1 + (times.draft_s / times.base_s if times.base_s else 0.0)
    return max(1, min(TRIAL, limit, int(TRIAL_COST / max(token, 1e-9))))


def best_length(acceptance: Acceptance, times: StepTimes, others: int, limit: int) -> int:
    """The length of a draft that makes a text's tokens come fastest; 0 if none is faster than no draft.

    Args:
        acceptance: counts which of the text's drafts were right.
        others: rows that other texts have in the step. What a draft costs, they wait for too.
        limit: the longest that is possible.
    """
    rate, draft = acceptance.rate, times.draft_s / times.base_s if times.base_s else 0.0
    best, fastest = 0, MARGIN * (1.0 + others) / times.ratio(1 + others)
    expected, chance = 1.0, 1.0
    for length in range(1, limit + 1):
        chance *= rate
        expected += chance
        speed = (expected + others) / (times.ratio(1 + length + others) + draft * length)
        if speed > fastest:
            best, fastest = length, speed
    return best
