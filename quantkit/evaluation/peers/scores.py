"""Scores what a peer predicts by the metrics of every other row, as far as it says enough for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from quantkit.evaluation.metric_table import RegisteredMetric
from quantkit.evaluation.metrics import PERPLEXITY, TOP1
from quantkit.evaluation.peers.base import PeerPrediction
from quantkit.evaluation.quality.window_scores import WindowScores

Means = Mapping[str, Sequence[float] | Sequence[Sequence[float]]]
"""Key of a metric → its mean over each window; per run the K statistics of each."""


class PeerScores:
    """One peer's windows of one text.

    With logits of the reference's vocabulary every metric is scored. Otherwise perplexity is, and top-1 if
    the likeliest tokens of all windows are known; what needs whole distributions, as KL does, is absent.

    Args:
        metrics: the metrics to measure where there are logits.
    """

    def __init__(self, metrics: Sequence[RegisteredMetric]) -> None:
        self._full = WindowScores(metrics, 1)
        self._partial: dict[str, list[float]] = {TOP1.name: [], PERPLEXITY.name: []}
        self._windows = self._scored = 0

    def add(self, reference: torch.Tensor, prediction: PeerPrediction, targets: torch.Tensor) -> None:
        """Score a window.

        Args:
            reference: logits ``[T, vocab]``.
            prediction: the prediction of T tokens.
            targets: the tokens that came, int64 ``[T]``.
        """
        self._windows += 1
        following, likeliest = prediction.following, prediction.likeliest
        if (logits := prediction.logits) is not None:
            logits = logits.to(reference.device)
            if logits.shape == reference.shape:
                self._full.add(0, reference, logits, targets)
                self._scored += 1
                return
            following = logits.log_softmax(-1).gather(-1, targets.to(logits.device)[:, None])[:, 0]
            likeliest = logits.argmax(-1)
        if following is not None:
            self._partial[PERPLEXITY.name].append(-float(following.double().mean()))
        if likeliest is not None:
            same = reference.argmax(-1).cpu() == likeliest.cpu()
            self._partial[TOP1.name].append(float(same.double().mean()))

    @property
    def complete(self) -> bool:
        """Whether all windows had logits."""
        return 0 < self._scored == self._windows

    def means(self) -> dict[str, list[float] | list[list[float]]]:
        """Every metric that is known of all windows."""
        if self.complete:
            return {name: np.stack(values).tolist() for name, values in self._full.means[0].items()}
        return {name: list(means) for name, means in self._partial.items()
                if means and len(means) == self._windows}

    def arrays(self) -> dict[str, np.ndarray]:
        """Each token's scores; empty without logits."""
        return self._full.tokens(0).arrays() if self.complete else {}
