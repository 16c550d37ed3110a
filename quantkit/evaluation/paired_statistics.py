"""Intervals and tests for paired differences: windows of a text, and right or wrong answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from quantkit.evaluation.metrics import CONFIDENCE, RESAMPLES, Interval

FLIPS = 9999
"""Sign flips that are drawn where not all of them are tried: with 13 pairs there are 8192 in all."""
EQUIVALENCE = 0.90
"""Confidence of the interval that two one-sided tests at 5% compare with ±epsilon."""
_BLOCK = 2**21


def mcnemar(lost: int, gained: int) -> float:
    """McNemar's exact test, two-sided; 1 if no pair differs. https://doi.org/10.1007/BF02295996

    Args:
        lost: pairs where only the first is right.
        gained: pairs where only the second is.
    """
    total = lost + gained
    tail = sum(math.comb(total, count) for count in range(min(lost, gained) + 1))
    return min(1.0, 2 * tail / 2 ** total)


def newcombe(both: int, lost: int, gained: int, neither: int,
             confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Newcombe's interval for the difference of two paired proportions, gained less lost, over all pairs.

    His method 10: Wilson's intervals of both shares, with the correlation of the pairs, corrected for
    continuity. It stays sensible where no pair differs. Newcombe 1998, Statistics in Medicine 17, 2635:
    https://doi.org/10.1002/(SICI)1097-0258(19981130)17:22%3C2635::AID-SIM954%3E3.0.CO;2-C

    Args:
        both, lost, gained, neither: pairs where both, only the first, only the second, none is right.
        confidence: the confidence of the interval.
    """
    from scipy.stats import binomtest

    items = both + lost + gained + neither
    before, after = both + lost, both + gained
    (low1, high1), (low2, high2) = (
        binomtest(right, items).proportion_ci(confidence, "wilson") for right in (before, after))
    share1, share2 = before / items, after / items
    margins = before * (items - before) * after * (items - after)
    phi = 0.0
    if margins:
        agreement = both * neither - lost * gained
        phi = max(agreement - items / 2, 0) if agreement > 0 else agreement
        phi /= math.sqrt(margins)
    difference = share2 - share1

    def reach(to1: float, to2: float) -> float:
        return math.sqrt(max(0.0, to1**2 - 2 * phi * to1 * to2 + to2**2))

    return (difference - reach(high1 - share1, share2 - low2),
            difference + reach(share1 - low1, high2 - share2))


def unpaired(reference: Interval, candidate: Interval) -> Interval:
    """The difference of two values whose items can't be paired, from their own intervals.

    Too wide where the items are in fact the same. Zou and Donner 2008: https://doi.org/10.1002/sim.3095
    """
    change = candidate.value - reference.value
    return Interval(change,
                    change - math.hypot(candidate.value - candidate.low, reference.high - reference.value),
                    change + math.hypot(candidate.high - candidate.value, reference.value - reference.low))


def resampled_means(strata: Sequence[np.ndarray], seed: int = 0) -> np.ndarray:
    """Means over all values, ``[RESAMPLES]``, of resamples within each stratum.

    Args:
        strata: values, such as the differences of each window; a text each.
        seed: the seed of the draws.
    """
    random = np.random.default_rng(seed)
    total = np.zeros(RESAMPLES)
    for values in strata:
        size = max(1, min(RESAMPLES, _BLOCK // len(values)))
        total += np.concatenate([
            values[random.integers(0, len(values), (min(size, RESAMPLES - begin), len(values)))].sum(axis=1)
            for begin in range(0, RESAMPLES, size)])
    return total / sum(map(len, strata))


def percentile_interval(means: np.ndarray, value: float, freedom: int,
                        confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The bootstrap's percentiles, moved apart for few values as Student's t moves apart a normal interval's
    ends; it always contains the value. Hesterberg 2015: https://doi.org/10.1080/00031305.2015.1089789

    Args:
        means: the means of resamples.
        value: the mean itself.
        freedom: values less strata. At 0 nothing is known about the spread, and the interval is the value.
        confidence: the confidence of the interval.
    """
    if freedom < 1:
        return value, value
    from scipy.stats import norm, t

    quantile = float(t.ppf((1 - confidence) / 2, freedom)) * math.sqrt((freedom + 1) / freedom)
    tail = 100 * float(norm.cdf(quantile))
    low, high = np.percentile(means, [tail, 100 - tail])
    return min(float(low), value), max(float(high), value)


def sign_flips(values: np.ndarray, alternative: str = "two-sided", seed: int = 0) -> float:
    """p of the test that values are symmetric around 0: each one's sign is a coin toss.

    All combinations are tried where there are at most :data:`FLIPS`, otherwise that many are drawn. A single
    value's sign says nothing: p is 1.
    https://doi.org/10.1007/b138696 (Good, Permutation, Parametric and Bootstrap Tests of Hypotheses)

    Args:
        values: differences of pairs, ``[pairs]``.
        alternative: ``two-sided``; ``greater`` and ``less`` than 0.
        seed: the seed of the draws.
    """
    if len(values) < 2 or not values.any():
        return 1.0
    from scipy.stats import permutation_test

    result = permutation_test((values,), np.mean, permutation_type="samples", alternative=alternative,
                              n_resamples=FLIPS, batch=max(1, _BLOCK // len(values)), vectorized=True,
                              rng=np.random.default_rng(seed))
    return min(1.0, float(result.pvalue))
