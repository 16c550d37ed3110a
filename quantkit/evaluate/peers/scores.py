"""Scores what a peer predicts by the metrics of every other row, as far as it says enough for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quantkit.evaluate.metric_table import RegisteredMetric
from quantkit.evaluate.metrics import PERPLEXITY, TOP1, Interval
from quantkit.evaluate.peers.base import PeerPrediction
from quantkit.evaluate.window_scores import WindowScores


class PeerScores:
    """One peer's windows of one text, or of all.

    With logits of the reference's vocabulary every metric is scored. Otherwise perplexity is, and top-1 if
    the likeliest tokens of all windows are known; what needs whole distributions, as KL does, is absent.

    Args:
        metrics: what is measured where there are logits.
    """

    def __init__(self, metrics: Sequence[RegisteredMetric]) -> None:
        self._full = WindowScores(metrics, 1)
        self._partial: dict[str, list[float]] = {PERPLEXITY.name: [], TOP1.name: []}
        self._windows = self._scored = 0

    def add(self, reference: torch.Tensor, prediction: PeerPrediction, targets: torch.Tensor) -> None:
        """Score a window.

        Args:
            reference: logits ``[T, vocab]``.
            prediction: of T tokens.
            targets: the tokens that came, int64 ``[T]``.
        """
        self._windows += 1
        following, likeliest = prediction.following, prediction.likeliest
        if (logits := prediction.logits) is not None:
            logits = logits.to(reference.device)
            if logits.shape == reference.shape:
                self._full.add(0, reference, logits, targets)
                self._scored += 1
            following = logits.log_softmax(-1).gather(-1, targets.to(logits.device)[:, None])[:, 0]
            likeliest = logits.argmax(-1)
        if following is not None:
            self._partial[PERPLEXITY.name].append(-float(following.double().mean()))
        if likeliest is not None:
            same = reference.argmax(-1).cpu() == likeliest.cpu()
            self._partial[TOP1.name].append(float(same.double().mean()))

    def extend(self, windows: PeerScores) -> None:
        """Add another text's windows."""
        self._full.extend(windows._full)
        self._windows, self._scored = self._windows + windows._windows, self._scored + windows._scored
        for name, means in windows._partial.items():
            self._partial[name].extend(means)

    def summary(self) -> dict[str, Interval]:
        """Every metric that is known of all windows, by its key."""
        if self._windows and self._scored == self._windows:
            return self._full.summaries()[0]
        return {metric.name: metric.summarize(np.array(self._partial[metric.name]))
                for metric in (TOP1, PERPLEXITY) if metric.name in self.window_means()}

    def window_means(self) -> dict[str, list[float]]:
        """Key → the mean of each window, of the same metrics."""
        if self._windows and self._scored == self._windows:
            return self._full.window_means(0)
        return {name: means for name, means in self._partial.items() if means and len(means) == self._windows}
