"""Quality metrics. Each scores every predicted token of a window; windows give the interval.

KL and top-1 compare with the reference model token by token, which tells far smaller damage from
noise than perplexity does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A value and its 95% interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Metric:
    """A registered metric.

    Attributes:
        name: its key in results.
        score: ``(reference log-probabilities float32 [T, vocab], candidate's, targets int64 [T])``
            → a score for every token, ``[T]``.
        of_mean: mean score → reported value; it must not decrease.
    """

    name: str
    score: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    of_mean: Callable[[np.ndarray], np.ndarray] = lambda mean: mean

    def summarize(self, means: list[float], seed: int = 0) -> Interval:
        """The value over all windows, and a percentile bootstrap over windows as the interval.

        Args:
            means: the mean score of each window; windows are of equal length. With a single one
                nothing is known about the spread, and the interval is the value itself.
            seed: of the bootstrap.

        Raises:
            ValueError: no windows.
        """
        if not means:
            raise ValueError("no windows")
        scores = np.asarray(means, dtype=np.float64)
        picks = np.random.default_rng(seed).integers(0, len(scores), (RESAMPLES, len(scores)))
        tail = 50 * (1 - CONFIDENCE)
        low, high = np.percentile(scores[picks].mean(axis=1), [tail, 100 - tail])
        value = scores.mean()
        # of_mean is monotone: percentiles may be taken before it, where they can't overflow
        with np.errstate(over="ignore"):
            return Interval(*(float(self.of_mean(end)) for end in (value, min(low, value), max(high, value))))


def _nll(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -candidate.gather(-1, targets[:, None])[:, 0]


def _kl(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    # a small KL is what is left of large terms of both signs: their sum needs more than float32.
    # A token that the reference excludes adds nothing, whatever the candidate thinks of it.
    gap = torch.where(reference == -torch.inf, 0.0, reference - candidate)
    return (reference.exp() * gap).sum(-1, dtype=torch.float64)


def _agree(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (reference.argmax(-1) == candidate.argmax(-1)).float()


PERPLEXITY = Metric("perplexity", _nll, np.exp)
"""exp of the mean negative log-likelihood a token."""
KL = Metric("kl_mean", _kl)
"""Mean Kullback-Leibler divergence KL(reference ‖ candidate) a token, in nats."""
EXACT = "kl_exact"
"""Key of the same divergence from the reference's weights in float32 arithmetic."""
TOP1 = Metric("top1", _agree)
"""Share of tokens where both models find the same one likeliest."""
