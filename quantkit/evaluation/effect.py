"""How much a difference from the reference means to a reader, in four words (docs/evaluation.md).

The limits are of KL, in nats a token. A KL of d raises perplexity about exp(d) times on text that the
reference predicts well: 0.01 is 1%, less than the interval of a usual run; 0.1 is 10%; 0.5 is 65%. The limits
of shares are the tokens whose likeliest one is another at these KLs, as measured with SmolLM2-135M
(evals/results): one in 20, one in 6, two in 5.
"""

from __future__ import annotations

import bisect
import math
from typing import Literal

from quantkit.evaluation.metrics import KL, PERPLEXITY, TOP1, Interval
from quantkit.evaluation.result import ModelResult

Effect = Literal["negligible", "small", "visible", "broken"]
WORDS: tuple[Effect, ...] = ("negligible", "small", "visible", "broken")
NATS = (0.01, 0.1, 0.5)
"""KL, or a token's rise of the negative log-likelihood, from which on the next word holds."""
SHARES = (0.05, 0.16, 0.4)
"""Share of tokens that flip, from which on the next word holds."""


def effect_of(metric: str, low: float, high: float) -> Effect | None:
    """The word for a difference from the reference, by the worse end of its interval, so that few windows
    never make a model look better than many would.

    Args:
        metric: the key of the metric.
        low, high: the ends of the difference's interval: nats, of ``top1`` and ``flips`` a share.

    Returns:
        ``None``: no word is defined for this metric.
    """
    if metric == TOP1.name:
        worst, limits = -low, SHARES
    elif metric == "flips":
        worst, limits = high, SHARES
    elif metric in (KL.name, PERPLEXITY.name):
        worst, limits = high, NATS
    else:
        return None
    return WORDS[bisect.bisect_right(limits, worst)] if not math.isnan(worst) else None


def effect_of_row(row: ModelResult) -> Effect | None:
    """The word for a variant, by its mean KL; without one by its share of flips. ``None``: neither is
    there."""
    if (kl := row.metrics.get(KL.name)) is not None:
        return effect_of(KL.name, kl.low, kl.high)
    top1 = row.metrics.get(TOP1.name)
    return None if top1 is None else effect_of(TOP1.name, top1.low - 1, top1.high - 1)


def differs(first: Interval | None, second: Interval | None) -> bool:
    """Whether two speeds differ beyond their noise: the ranges of several timed runs don't overlap."""
    if first is None or second is None or first.low == first.high or second.low == second.high:
        return False
    return first.low > second.high or second.low > first.high
