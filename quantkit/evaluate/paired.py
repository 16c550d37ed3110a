"""Paired comparisons of a variant with the reference, item by item, and what they allow to say."""

from __future__ import annotations

from typing import Literal

from quantkit.spec import Frozen

Verdict = Literal["better", "worse", "indistinguishable", "undecided"]


class PairedDifference(Frozen):
    """A variant's metric less the reference's, over the same items.

    Attributes:
        metric: key of the metric, such as ``kl_mean`` or ``arc_easy/acc``.
        text: name of the text that it is of; ``""``: all texts, or a task.
        difference: mean over items.
        low, high: its 95% interval.
        p: of the paired test, two-sided; ``None`` where there is none.
        test: which one: ``McNemar, exact``, ``sign flips over windows``.
        items: pairs.
        epsilon: the difference that counts as none.
        verdict: ``indistinguishable``: the 90% interval lies within ±epsilon (two one-sided tests at 5%);
            ``better`` and ``worse``: the 95% interval excludes 0; else ``undecided``.
    """

    metric: str
    text: str = ""
    difference: float
    low: float
    high: float
    p: float | None = None
    test: str = ""
    items: int = 0
    epsilon: float | None = None
    verdict: Verdict = "undecided"
