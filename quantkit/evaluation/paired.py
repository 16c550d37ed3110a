"""Paired comparisons of a variant with the reference, item by item, and what they allow to say."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quantkit.evaluation.keys import TAILS
from quantkit.evaluation.metric_table import MetricInfo, builtin_infos, task_info
from quantkit.evaluation.metrics import Interval, Metric
from quantkit.evaluation.paired_statistics import (
    EQUIVALENCE,
    mcnemar,
    newcombe,
    percentile_interval,
    resampled_means,
    sign_flips,
)
from quantkit.evaluation.result import ModelResult, PairedDifference, Verdict

DISTANCES = {"kl_mean": 0.0, **dict.fromkeys(TAILS, 0.0), "top1": 1.0}
"""Metrics that already compare with the reference, and what they are for the reference itself."""
EPSILONS = {"kl_mean": 1e-3, "kl_median": 1e-3, "kl_p99": 1e-3, "kl_p999": 1e-3, "flips": 0.01, "top1": 0.01,
            "perplexity": 0.005}
"""Differences that count as none: nats; shares; 0.5% of perplexity, as nats of log-likelihood."""
CHANGE = Metric("logprob_change", lambda reference, candidate, targets: candidate - reference)
SHARE_EPSILON = 0.01
"""That of tasks whose items are right or wrong."""


def differences(reference: ModelResult, candidate: ModelResult, infos: Mapping[str, MetricInfo] | None = None,
                *, floors: Mapping[str, Interval] | None = None, epsilons: Mapping[str, float] | None = None,
                seed: int = 0) -> list[PairedDifference]:
    """Everything that two variants can be compared in pair by pair: each metric on each text, on all texts
    together if there are several, and each task's score.

    A metric of windows has a bootstrap over windows (within each text) for its interval and sign flips of the
    windows' differences for its test. A score of right and wrong answers has Newcombe's interval and
    McNemar's exact test. What only one of the two has, has another number of items, or has a value that is
    not finite is left out. No p is corrected for the number of tests.

    KL, flips and top-1 are distances from the reference already. Where the reference's own is 0 (top-1: 1) or
    isn't there, nothing could be 0, so the question is whether the distance exceeds epsilon: the test is
    one-sided.

    Args:
        reference, candidate: whose ``window_means`` and ``items`` are compared.
        infos: the metrics' descriptions; by default the built-in ones.
        floors: noise floor of a metric, which is its epsilon if ``epsilons`` doesn't have it.
        epsilons: by key of a metric or name of a task; see :data:`EPSILONS` for the defaults.
        seed: the seed of bootstrap and sign flips.
    """
    known = builtin_infos() | dict(infos or {})
    result = []
    for pair in _windows(reference, candidate):
        if pair.key in DISTANCES:
            direction = "higher" if pair.key == "top1" else "lower"
        else:
            direction = known[pair.key].direction if pair.key in known else ""
        epsilon = epsilon_of(pair.key, floors, epsilons)
        result.append(of_windows(*pair, direction, epsilon, seed))
    for key, values in candidate.items.items():
        before = np.asarray(reference.items.get(key, ()), dtype=float)
        after = np.asarray(values, dtype=float)
        if len(before) == len(after) > 0 and np.isfinite(after - before).all():
            info = known.get(key) or task_info(key)
            shares = info.unit == "%"
            result.append(of_items(key, before, after, info.direction if shares else "higher",
                                   epsilon_of(key, floors, epsilons, shares), seed))
    return result


def epsilon_of(key: str, floors: Mapping[str, Interval] | None, epsilons: Mapping[str, float] | None,
               share: bool = False) -> float | None:
    """The difference in a metric that counts as none; ``None`` if nobody says.

    Args:
        key: the key of the metric.
        floors, epsilons: as in :func:`differences`.
        share: whether it is a task's share of right answers.
    """
    chosen = epsilons or {}
    for name in (key, key.partition("/")[0]):
        if name in chosen:
            return chosen[name]
    if key in DISTANCES and floors and key in floors and np.isfinite(floors[key].value):
        floor = abs(floors[key].value - DISTANCES[key])
        if floor > 0:  # of few tokens none may differ, which doesn't mean that none ever would
            return floor
    return SHARE_EPSILON if share else EPSILONS.get(key)


class _WindowPair(NamedTuple):
    """A metric on a text, and the two sides' windows, an array a text."""

    key: str
    text: str
    before: list[np.ndarray]
    after: list[np.ndarray]


def _windows(reference: ModelResult, candidate: ModelResult) -> Iterator[_WindowPair]:
    texts = candidate.window_means
    pooled: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    complete: dict[str, int] = {}
    for text, metrics in texts.items():
        for key, values in metrics.items():
            after = np.asarray(values, dtype=float)
            stored = reference.window_means.get(text, {}).get(key)
            if stored is None and key in DISTANCES:
                stored = [DISTANCES[key]] * len(after)
            before = np.asarray(stored if stored is not None else (), dtype=float)
            complete[key] = complete.get(key, 0) + 1
            if len(after) and len(before) == len(after) and np.isfinite(after - before).all():
                pooled.setdefault(key, []).append((before, after))
                if len(texts) > 1:
                    yield _WindowPair(key, text, [before], [after])
    for key, pairs in pooled.items():
        if len(pairs) == complete[key]:
            yield _WindowPair(key, "", [before for before, _ in pairs], [after for _, after in pairs])


def of_windows(key: str, text: str, before: Sequence[np.ndarray], after: Sequence[np.ndarray], direction: str,
               epsilon: float | None, seed: int = 0) -> PairedDifference:
    """Compare the means of the same windows.

    Args:
        key, text: whose they are.
        before, after: the reference's and the variant's, ``[windows]`` of each text.
        direction: ``lower`` or ``higher`` is better; ``""``: neither.
        epsilon: the difference that counts as none.
        seed: the seed of bootstrap and sign flips.
    """
    strata = [second - first for first, second in zip(before, after)]
    values = np.concatenate(strata)
    distance = key in DISTANCES and all((first == DISTANCES[key]).all() for first in before)
    mean = _bootstrap(strata, seed)
    verdict = _distance_verdict(mean, epsilon) if distance else _verdict(mean, direction, epsilon)
    if distance:
        sign = -1.0 if direction == "higher" else 1.0
        p = sign_flips(sign * values - (epsilon or 0.0), "greater", seed)
        test = "sign flips over windows, one-sided against epsilon"
    else:
        p, test = sign_flips(values, seed=seed), "sign flips over windows"
    several = len(values) > 1
    return PairedDifference(metric=key, text=text, difference=mean.value, low=mean.outer[0],
                            high=mean.outer[1], p=p if several else None, test=test if several else "",
                            items=len(values), epsilon=epsilon, verdict=verdict if several else "undecided")


def of_items(key: str, before: np.ndarray, after: np.ndarray, direction: str, epsilon: float | None,
             seed: int = 0) -> PairedDifference:
    """Compare the values of the same items of a task.

    Args:
        key: the key of the score.
        before, after: the reference's and the variant's, ``[items]``.
        direction: ``lower`` or ``higher`` is better.
        epsilon: the difference that counts as none.
        seed: the seed of the bootstrap, where answers aren't right or wrong.
    """
    if np.isin(before, (0, 1)).all() and np.isin(after, (0, 1)).all():
        both = int(((before == 1) & (after == 1)).sum())
        lost = int(((before == 1) & (after == 0)).sum())
        gained = int(((before == 0) & (after == 1)).sum())
        counts = both, lost, gained, len(before) - both - lost - gained
        mean = _Mean((gained - lost) / len(before), newcombe(*counts),
                     newcombe(*counts, confidence=EQUIVALENCE))
        p, test = mcnemar(lost, gained), "McNemar, exact"
    else:
        mean = _bootstrap([after - before], seed)
        p, test = sign_flips(after - before, seed=seed), "sign flips over items"
    return PairedDifference(metric=key, difference=mean.value, low=mean.outer[0], high=mean.outer[1], p=p,
                            test=test, items=len(before), epsilon=epsilon,
                            verdict=_verdict(mean, direction, epsilon))


@dataclass(frozen=True)
class AnswerPair:
    """One question, answered with the full cache and with a KV setting.

    Attributes:
        context: the context that it is about: questions that share one aren't independent.
        full, own: whether the full cache's, the setting's answer was right.
        change: log-probability of the right answer, the setting's less the full cache's, in nats.
    """

    context: object
    full: bool
    own: bool
    change: float


@dataclass(frozen=True)
class PairedAnswers:
    """A KV setting against the full cache.

    Attributes:
        asked: the number of questions.
        full, own: how many each answered.
        lost: the full cache answered, the setting didn't; ``gained``: the other way round.
        p: McNemar's exact test. It takes questions for independent, which those about one context aren't:
            with few contexts it is too small.
        change: mean change of the right answer's log-probability in nats, 95% by a bootstrap over contexts.
    """

    asked: int
    full: int
    own: int
    lost: int
    gained: int
    p: float
    change: Interval


def of_answers(pairs: Sequence[AnswerPair]) -> PairedAnswers:
    """Compare the answers to the same questions.

    Raises:
        ValueError: no pairs.
    """
    contexts: dict[object, list[float]] = {}
    for pair in pairs:
        contexts.setdefault(pair.context, []).append(pair.change)
    means = [math.fsum(changes) / len(changes) for changes in contexts.values()]
    lost = sum(pair.full and not pair.own for pair in pairs)
    gained = sum(pair.own and not pair.full for pair in pairs)
    return PairedAnswers(len(pairs), sum(pair.full for pair in pairs), sum(pair.own for pair in pairs), lost,
                         gained, mcnemar(lost, gained), CHANGE.summarize(means))


def ratio(reference: Interval, candidate: Interval) -> Interval:
    """How many times the reference's value a variant's is, with the range that both ranges allow. Speeds are
    compared so: medians of a few timed runs, without a test."""
    if not min(reference.low, reference.value, reference.high) > 0:
        return Interval(np.nan, np.nan, np.nan)
    return Interval(candidate.value / reference.value, candidate.low / reference.high,
                    candidate.high / reference.low)


class _Mean(NamedTuple):
    """A mean difference with its 95% and its 90% interval."""

    value: float
    outer: tuple[float, float]
    inner: tuple[float, float]

    def within(self, epsilon: float | None) -> bool:
        """Whether the 90% interval lies within ±epsilon."""
        return epsilon is not None and -epsilon <= self.inner[0] and self.inner[1] <= epsilon


def _bootstrap(strata: Sequence[np.ndarray], seed: int) -> _Mean:
    values, means = np.concatenate(strata), resampled_means(strata, seed)
    value, freedom = float(values.mean()), len(values) - len(strata)
    return _Mean(value, percentile_interval(means, value, freedom),
                 percentile_interval(means, value, freedom, EQUIVALENCE))


def _verdict(mean: _Mean, direction: str, epsilon: float | None) -> Verdict:
    outer = mean.outer
    if mean.within(epsilon):
        return "indistinguishable"
    if direction and (outer[0] > 0 or outer[1] < 0):
        return "better" if (outer[1] < 0) == (direction == "lower") else "worse"
    return "undecided"


def _distance_verdict(mean: _Mean, epsilon: float | None) -> Verdict:
    """A distance can only be worse. Both signs: top-1 falls where KL rises."""
    if epsilon is None:
        return "undecided"
    if mean.within(epsilon):
        return "indistinguishable"
    return "worse" if mean.outer[0] > epsilon or mean.outer[1] < -epsilon else "undecided"
