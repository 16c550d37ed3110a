"""Compares answers to the same questions with two caches, and tests whether a loss is chance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quantkit.evaluation.metrics import Interval, Metric
from quantkit.evaluation.paired_statistics import mcnemar

CHANGE = Metric("logprob_change", lambda reference, candidate, targets: candidate - reference)


@dataclass(frozen=True)
class AnswerPair:
    """One question with both.

    Attributes:
        context: which context it is about: questions that share one aren't independent.
        full, own: whether the full cache's, the setting's answer was right.
        change: log-probability of the right answer, the setting's less the full cache's, in nats.
    """

    context: object
    full: bool
    own: bool
    change: float


@dataclass(frozen=True)
class PairedTest:
    """A setting against the full cache.

    Attributes:
        asked: questions.
        full, own: how many each answered.
        lost: the full cache answered, the setting didn't; ``gained``: the other way round.
        p: of McNemar's exact test, two-sided: how often chance alone divides ``lost + gained`` so
            unevenly or more. It takes questions for independent, which those about one context aren't: with
            few contexts it is too small. https://doi.org/10.1007/BF02295996
        change: mean change of the right answer's log-probability in nats, 95% by a bootstrap over contexts.
    """

    asked: int
    full: int
    own: int
    lost: int
    gained: int
    p: float
    change: Interval


def compare(pairs: Sequence[AnswerPair]) -> PairedTest:
    """Count pairs and test their difference.

    Raises:
        ValueError: no pairs.
    """
    lost = sum(pair.full and not pair.own for pair in pairs)
    gained = sum(pair.own and not pair.full for pair in pairs)
    contexts: dict[object, list[float]] = {}
    for pair in pairs:
        contexts.setdefault(pair.context, []).append(pair.change)
    means = [math.fsum(changes) / len(changes) for changes in contexts.values()]
    return PairedTest(len(pairs), sum(pair.full for pair in pairs), sum(pair.own for pair in pairs), lost,
                      gained, mcnemar(lost, gained), CHANGE.summarize(means))
