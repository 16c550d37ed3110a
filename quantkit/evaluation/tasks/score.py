"""A task's score with its interval. Items are independent, so the interval is computed over items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quantkit.evaluation.metrics import RESAMPLES, Interval, percentiles

Z = 1.959963984540054
"""95% of a normal distribution lies within this number of standard deviations."""
PROPORTIONS = ("acc", "acc_norm", "acc_bytes", "exact_match")
"""Metrics that are the share of items that are right; the others are ratios of log-likelihoods."""
_BLOCK = 2**22


@dataclass(frozen=True)
class TaskScore:
    """One number of one task.

    Attributes:
        task: its name in its file.
        metric: ``acc``, ``acc_norm``, ``exact_match``, ``perplexity``, …; with several filters
            ``exact_match,FILTER``.
        interval: the value with its 95% interval.
        items: rows that were asked.
        values: a number for each item, in the items' order: see :func:`item_values`. Their mean is the value,
            or its logarithm, so that two models that were asked the same can be compared item by item.
        choices: the option that was chosen for each item, by this metric; ``None`` if there are none.
    """

    task: str
    metric: str
    interval: Interval
    items: int
    values: tuple[float, ...]
    choices: tuple[int, ...] | None = None


def score(metric: str, values: Sequence[float | tuple[float, float]], seed: int = 0) -> Interval:
    """A metric's value over all items.

    Args:
        metric: its name, without a filter's.
        values: the numbers that lm-eval gives for each item: 0 or 1; for ``perplexity`` the log-likelihood;
            for the others the log-likelihood and the number of words or bytes.
        seed: the seed of the bootstrap.

    Raises:
        ValueError: no items.
    """
    if not values:
        raise ValueError("no items")
    if metric in PROPORTIONS:
        return wilson(sum(float(value) for value in values if not isinstance(value, tuple)), len(values))
    mean = _bootstrap(_pairs(values), seed)
    of = (lambda end: end / math.log(2)) if metric == "bits_per_byte" else _exp
    return Interval(of(mean.value), of(mean.low), of(mean.high))


def item_values(metric: str, values: Sequence[float | tuple[float, float]]) -> tuple[float, ...]:
    """Each item's part in a metric: their mean is the metric's value, of perplexities its logarithm.

    Args:
        metric, values: as for :func:`score`.

    Returns:
        Of shares 0 or 1. Of perplexities the item's negative log-likelihood, in nats, over the mean number of
        words or bytes of all items; of ``bits_per_byte`` the same in bits.
    """
    if metric in PROPORTIONS:
        return tuple(float(value) for value in values if not isinstance(value, tuple))
    pairs = _pairs(values)
    unit = pairs[:, 1].mean() * (math.log(2) if metric == "bits_per_byte" else 1)
    return tuple((-pairs[:, 0] / unit).tolist())


def _pairs(values: Sequence[float | tuple[float, float]]) -> np.ndarray:
    """Log-likelihoods and numbers of words or bytes, ``[items, 2]``."""
    return np.asarray([value if isinstance(value, tuple) else (value, 1.0) for value in values], dtype=float)


def wilson(right: float, items: int) -> Interval:
    """A share of right answers and Wilson's score interval, which stays sensible near 0 and 1.

    https://doi.org/10.1080/01621459.1927.10502953
    """
    share, over = right / items, 1 + Z * Z / items
    center = (share + Z * Z / (2 * items)) / over
    half = Z / over * math.sqrt(share * (1 - share) / items + Z * Z / (4 * items * items))
    return Interval(share, max(0.0, min(share, center - half)), min(1.0, max(share, center + half)))


def _bootstrap(pairs: np.ndarray, seed: int) -> Interval:
    """Negative log-likelihood a unit over ``pairs [items, 2]``, and a percentile bootstrap over items."""
    random, sums = np.random.default_rng(seed), []
    for rows in _blocks(len(pairs)):
        drawn = pairs[random.integers(0, len(pairs), (rows, len(pairs)))].sum(axis=1)
        sums.append(-drawn[:, 0] / drawn[:, 1])
    return Interval.around(-pairs[:, 0].sum() / pairs[:, 1].sum(), *percentiles(np.concatenate(sums)))


def _blocks(items: int) -> list[int]:
    size = max(1, min(RESAMPLES, _BLOCK // items))
    return [size] * (RESAMPLES // size) + ([RESAMPLES % size] if RESAMPLES % size else [])


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
