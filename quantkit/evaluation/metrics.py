"""Quality metrics. Each scores what a model predicts in windows of a text; windows give the interval.

KL and top-1 compare with the reference model token by token, which tells far smaller damage from
noise than perplexity does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

RESAMPLES = 2000
CONFIDENCE = 0.95
_TAIL = 50 * (1 - CONFIDENCE)


@dataclass(frozen=True)
class Interval:
    """A value and its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, low: float, high: float) -> Interval:
        """An interval that contains its value, whatever a bootstrap's percentiles are."""
        return cls(float(value), float(min(low, value)), float(max(high, value)))


def finite(value: float | None) -> float | None:
    """A number as JSON has it: ``None`` for one that isn't finite."""
    return value if value is not None and math.isfinite(value) else None


def identity(mean: np.ndarray) -> np.ndarray:
    """The mean score is what is reported."""
    return mean


@dataclass(frozen=True)
class Metric:
    """A registered metric.

    ``score`` is called as ``score(reference, candidate, targets)``: log-probabilities of the reference and of
    the model, both float32 ``[T, vocab]`` and on one device, and the tokens that came, int64 ``[T]``. It
    returns a real tensor and writes to no argument. What T is, and what it returns, depends on ``per``:

    - ``"token"``: T is a part of a window, and every token has a score, ``[T]``. A token's score must not
      depend on the others of its part. Their mean over all tokens is taken.
    - ``"window"``: T is a whole window, which has one score, ``[]``. The mean over windows is taken. A whole
      window's log-probabilities are kept in memory at once for this.
    - ``"run"``: T is a part of a window, and every token has K statistics, ``[T, K]``, where K is always the
      same. ``of_mean`` makes the value of their means over all tokens: a calibration error, a correlation.

    Of a model that writes blocks, the mask's log-probability is the lowest number that there is.

    A score may be infinite, which makes the value infinite; statistics must be finite. NaN is refused.

    Attributes:
        name: its key in results. It must not be one of :data:`~quantkit.evaluation.keys.RESERVED_KEYS`.
        score: the function that is described above. It is called in the evaluating process's main thread, for
            each model and each part of some dozens of tokens or more (``per="window"``: each window), in
            inference mode.
        of_mean: mean → reported value. Per token and window: shape ``[...]`` → ``[...]``, elementwise, and it
            must not decrease. Per run: ``[..., K]`` → ``[...]``, any function. Called a few times at the end.
        per: the part of a text that has a score.
        title: head of its column, at most 24 characters; ``""`` is the name.
        unit: shown beside the title; ``"%"`` values are shares, and shown times 100.
        direction: whether ``lower`` or ``higher`` values are better; ``""``: neither.
    """

    name: str
    score: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    of_mean: Callable[[np.ndarray], np.ndarray] = identity
    per: Literal["token", "window", "run"] = "token"
    title: str = ""
    unit: str = ""
    direction: Literal["lower", "higher", ""] = ""

    def summarize(self, means: Sequence[float] | np.ndarray, seed: int = 0) -> Interval:
        """The value over all windows, and a percentile bootstrap over windows as the interval.

        A run's means are resampled and ``of_mean`` is taken of each: its percentiles leave out what is NaN in
        a resample. The interval always contains the value.

        Args:
            means: the mean score of each window, ``[windows]``; per run ``[windows, K]``. Windows are of
                equal length. With a single one nothing is known about the spread, and the interval is the
                value itself.
            seed: the seed of the bootstrap.

        Raises:
            ValueError: no windows, or ``of_mean`` returned another shape, NaN, or less for more.
        """
        scores = np.asarray(means, dtype=np.float64)
        if not len(scores):
            raise ValueError("no windows")
        picks = np.random.default_rng(seed).integers(0, len(scores), (RESAMPLES, len(scores)))
        if self.per == "run":
            return self._of_run(scores, picks)
        value = scores.mean()
        low, high = percentiles(scores[picks].mean(axis=1))
        # of_mean is monotone: percentiles may be taken before it, where they can't overflow
        ends = self._reported(np.array([min(low, value), value, max(high, value)]), 3)
        if not ends[0] <= ends[1] <= ends[2]:
            raise ValueError("of_mean gives less for a larger mean")
        return Interval(float(ends[1]), float(ends[0]), float(ends[2]))

    def _of_run(self, scores: np.ndarray, picks: np.ndarray) -> Interval:
        counts = np.stack([np.bincount(row, minlength=len(scores)) for row in picks])
        value = float(self._reported(scores.mean(axis=0)[None], 1)[0])
        values = self._reported(counts @ scores / len(scores), len(picks), missing=True)
        low, high = percentiles(values[~np.isnan(values)])
        return Interval.around(value, low, high)

    def _reported(self, means: np.ndarray, count: int, missing: bool = False) -> np.ndarray:
        with np.errstate(all="ignore"):
            values = np.asarray(self.of_mean(means))
        if values.shape != (count,):
            raise ValueError(f"of_mean makes {list(values.shape)} of {list(means.shape)}; "
                             f"it should be {[count]}")
        if values.dtype.kind not in "fiub":
            raise ValueError(f"of_mean returns {values.dtype}, no real numbers")
        values = values.astype(np.float64)
        if np.isnan(values).any() and not missing:
            raise ValueError("its value is not a number")
        return values


def percentiles(values: np.ndarray) -> tuple[float, float]:
    """The ends of the interval; next to an infinite value there is nothing to interpolate."""
    if not len(values):
        return np.inf, -np.inf
    if np.isfinite(values).all():
        low, high = np.percentile(values, [_TAIL, 100 - _TAIL])
    else:
        low = np.percentile(values, _TAIL, method="lower")
        high = np.percentile(values, 100 - _TAIL, method="higher")
    return float(low), float(high)


def _nll(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -candidate.gather(-1, targets[:, None])[:, 0]


def _kl(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # a small KL is what is left of large terms of both signs: their sum needs more than float32.
    # A token that the reference excludes adds nothing, whatever the candidate thinks of it.
    share = reference.exp()
    gap = (reference - candidate).masked_fill_(share == 0, 0.0)
    return gap.mul_(share).sum(-1, dtype=torch.float64)


def _agree(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (reference.argmax(-1) == candidate.argmax(-1)).float()


PERPLEXITY = Metric("perplexity", _nll, np.exp, direction="lower")
"""exp of the mean negative log-likelihood a token."""
KL = Metric("kl_mean", _kl, title="KL", unit="nats", direction="lower")
"""Mean Kullback-Leibler divergence KL(reference ‖ candidate) a token, in nats."""
TOP1 = Metric("top1", _agree, title="top-1", unit="%", direction="higher")
"""Share of tokens where both models find the same one likeliest."""
