"""Orders token sequences so that a prefix that several of them share is computed once.

In alphabetical order, the longest prefix that a sequence shares with any earlier one is the one that it
shares with the sequence before it. So going through them in this order is a walk through their prefix tree
(the radix tree of RadixAttention, https://arxiv.org/abs/2312.07104), and a KV cache that takes back what
follows the common prefix needs no more memory than the longest sequence. The walk is cut into runs that can
go side by side.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Tokens = tuple[int, ...]

MIN_INHERITED = 32
"""Tokens of a prefix that a run takes over from the run before it, at least: fewer are computed sooner than
the pages are copied in which they lie."""
FILLED = 1.5
"""Runs side by side have this many times the tokens that a step takes: some of a run are skipped now and
then."""


@dataclass(frozen=True)
class Run:
    """Sequences that go through one sequence of a cache, one after another.

    Attributes:
        first, end: the numbers of the first one, and behind the last one.
        inherited: tokens of the first one that the run before this one computes, for its own first one.
    """

    first: int
    end: int
    inherited: int


@dataclass(frozen=True)
class PrefixPlan:
    """An order in which sequences share their prefixes.

    Attributes:
        sequences: in this order, each once.
        shared: for each sequence the number of its tokens that are computed already when its turn comes.
        runs: hold all sequences together.
    """

    sequences: list[Tokens]
    shared: list[int]
    runs: list[Run]

    @property
    def tokens(self) -> int:
        """Tokens that are computed."""
        return sum(map(len, self.sequences)) - sum(self.shared)

    def computed_by(self) -> Iterator[ComputedBy]:
        """For each sequence, which sequences compute its tokens."""
        starts: list[int] = []
        numbers: list[int] = []
        for number, shared in enumerate(self.shared):
            kept = bisect.bisect_left(starts, shared)
            del starts[kept:], numbers[kept:]
            starts.append(shared)
            numbers.append(number)
            yield ComputedBy(starts, numbers)


@dataclass(frozen=True)
class ComputedBy:
    """Which sequences compute the tokens of one of them: ``numbers[i]`` those from ``starts[i]`` on. Valid
    until the next one is asked for."""

    starts: list[int]
    numbers: list[int]

    def __getitem__(self, place: int) -> int:
        """The sequence that computes the token at this place."""
        return self.numbers[bisect.bisect_right(self.starts, place) - 1]


def plan_prefixes(sequences: Sequence[Tokens], runs: int, step: int,
                  min_inherited: int = MIN_INHERITED) -> PrefixPlan:
    """Put sequences in order and cut the order into runs of about as much work.

    Args:
        sequences: none is empty; equal ones are taken once.
        runs: at most; no more than are needed to fill steps.
        step: tokens that a step takes, of one sequence of each run.
        min_inherited: the least tokens that a run inherits, see :data:`MIN_INHERITED`.
    """
    ordered = sorted(set(sequences))
    shared = [0, *map(_common, ordered, ordered[1:])][:len(ordered)]
    unshared = [len(ids) - known for ids, known in zip(ordered, shared)]
    needed = math.ceil(FILLED * step * len(unshared) / max(1, sum(unshared)))
    starts = _starts(unshared, shared, max(1, min(runs, needed)), min_inherited)
    planned: list[Run] = []
    for first, end in zip(starts, [*starts[1:], len(ordered)]):
        inherited = 0
        if planned:
            before = planned[-1]
            common = min(shared[before.first + 1:first + 1])
            # for a few tokens more this run needn't wait until the run before it has computed them
            near = before.inherited >= min_inherited > common - before.inherited
            common = min(common, before.inherited) if near else common
            inherited = common if common >= min_inherited else 0
        planned.append(Run(first, end, inherited))
    for run in planned:
        shared[run.first] = run.inherited
    return PrefixPlan(ordered, shared, planned)


def _common(first: Tokens, second: Tokens) -> int:
    """Tokens at the beginning that both have."""
    length = min(len(first), len(second))
    if first[:length] == second[:length]:
        return length
    return int(np.argmax(np.array(first[:length]) != np.array(second[:length])))


def _starts(unshared: Sequence[int], shared: Sequence[int], runs: int, min_inherited: int) -> list[int]:
    """Where runs begin: where that costs little, about as much work apart.

    A sequence's work is the tokens of its own, and as many again as one has on average: a step takes the
    tokens of one sequence of each run, however few they are.
    """
    if not unshared:
        return []
    work = [tokens + sum(unshared) / len(unshared) for tokens in unshared]
    starts, remaining = [0], sum(work)
    while len(starts) < runs:
        share = remaining / (runs + 1 - len(starts))
        best = (math.inf, 0, 0.0)
        done = 0.0
        common = math.inf
        for number in range(starts[-1] + 1, len(unshared)):
            done, common = done + work[number - 1], min(common, shared[number])
            if done >= share / 2:
                # what is shared is computed again, unless it can be inherited
                again = shared[number] - (common if common >= min_inherited else 0)
                best = min(best, (again + abs(done - share) / 2, number, done))
            if done >= 2 * share:
                break
        _, start, before = best
        if not start:
            break
        starts.append(start)
        remaining -= before
    return starts
