"""Single tokens' scores: what percentiles, paired tests and a text's token-by-token view are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from quantkit.evaluation.keys import TAILS
from quantkit.evaluation.metrics import Interval, percentiles

SCORES = ("kl", "loss", "likeliest", "agrees")
"""The arrays of :class:`TokenScores`."""
RESAMPLES = 400
"""Of a percentile's bootstrap: each sorts all tokens anew."""


@dataclass(frozen=True)
class TokenScores:
    """What one variant makes of each scored token of a text, beside the reference.

    Attributes:
        kl: float32 ``[windows, n]``, nats from the reference.
        loss: float32 ``[windows, n]``, negative log-likelihood of the token that came.
        likeliest: int32 ``[windows, n]``, the token that this variant finds likeliest.
        agrees: bool ``[windows, n]``, whether the reference finds the same one likeliest.
    """

    kl: np.ndarray
    loss: np.ndarray
    likeliest: np.ndarray
    agrees: np.ndarray

    def arrays(self) -> dict[str, np.ndarray]:
        """By name, to be stored."""
        return {name: getattr(self, name) for name in SCORES}

    @classmethod
    def of_arrays(cls, arrays: Mapping[str, np.ndarray], prefix: str) -> TokenScores:
        """What was stored, its names behind a prefix."""
        return cls(*(arrays[f"{prefix}{name}"] for name in SCORES))


def joined(parts: list[TokenScores]) -> TokenScores:
    """The tokens of several texts, whose windows are of equal length."""
    return TokenScores(*(np.concatenate([part.arrays()[name] for part in parts]) for name in SCORES))


def tails(scores: TokenScores, seed: int = 0) -> dict[str, Interval]:
    """The KL's median, 99% and 99.9% over tokens, and flips: the share of tokens whose likeliest one is not
    the reference's. Intervals are 95% bootstraps over windows.

    Args:
        scores: the scores of all tokens.
        seed: the seed of the bootstrap.
    """
    windows = len(scores.kl)
    picks = np.random.default_rng(seed).integers(0, windows, (RESAMPLES, windows))
    shares = (0.5, 0.99, 0.999)
    # a KL is never negative, but what is left of large terms may be
    kl = np.maximum(scores.kl, 0.0)
    values = np.quantile(kl, shares)
    drawn = np.stack([np.quantile(kl[row], shares) for row in picks])
    flips = 1.0 - scores.agrees.mean(axis=1)
    pairs = [(values[place], drawn[:, place]) for place in range(len(shares))]
    pairs.append((flips.mean(), flips[picks].mean(axis=1)))
    return {key: Interval.around(value, *percentiles(samples))
            for key, (value, samples) in zip(TAILS, pairs)}
