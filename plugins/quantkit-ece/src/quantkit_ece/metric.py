"""Expected calibration error of the likeliest token: Guo et al. 2017, https://arxiv.org/abs/1706.04599.

Tokens are sorted into 15 bins of equal width by their confidence, the probability of the likeliest token. In
each bin the share of right predictions is compared with the mean confidence; the error is the mean of the
differences' sizes, weighted by the bins' numbers of tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from quantkit.evaluation.metrics import Metric

BINS = 15


def score(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """``[T, vocab]`` log-probabilities and targets ``[T]`` → float64 ``[T, BINS]``.

    The column of a token's bin has 1 or 0 for a right or wrong prediction less its confidence, others 0.

    A bin's weight times its difference, n/N · (right/n − confidence/n), is the mean of its column over all N
    tokens: nothing else has to be kept.
    """
    logprob, predicted = candidate.max(-1)
    confidence = logprob.double().exp().clamp(max=1.0)
    # bins are (0, 1/15], (1/15, 2/15], …, as in the paper
    index = ((confidence * BINS).ceil().long() - 1).clamp(0, BINS - 1)
    gap = (predicted == targets).double() - confidence
    return torch.zeros(len(gap), BINS, dtype=torch.float64, device=gap.device).scatter_(
        1, index[:, None], gap[:, None])


def of_mean(mean: np.ndarray) -> np.ndarray:
    """Means of columns ``[..., BINS]`` → the error ``[...]``, between 0 and 1."""
    error: np.ndarray = np.abs(mean).sum(axis=-1)
    return error


METRIC = Metric("ece", score, of_mean, per="run", title="ECE", unit="%", direction="lower")
