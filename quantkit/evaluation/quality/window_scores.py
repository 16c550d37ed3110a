"""Scores windows by every metric, and sums up; a plugin's metric that fails costs itself only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from quantkit.evaluation.keys import EXACT
from quantkit.evaluation.metric_table import RegisteredMetric, left_out
from quantkit.evaluation.metrics import KL, PERPLEXITY, TOP1, Interval, Metric
from quantkit.evaluation.quality.token_scores import TokenScores

LOGITS = 10 * 2**20
"""Logits that are scored at once, at least, unless a metric is of whole windows. As
float32 they take more than the 32 MiB from which on glibc always gives memory back to the system: smaller
tensors leave holes in its heap, which takes gigabytes in the end."""
LOGIT_BYTES = 36
"""Of a logit with its copies while it is scored: probabilities of both models, and what they differ by."""
_LIKELIEST = "likeliest"
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Log-probabilities float32 ``[T, vocab]`` of the reference and of the candidate, targets int64 ``[T]``."""


class LogitRows(Protocol):
    """Logits ``[T, vocab]`` of any float dtype: a tensor, or what makes a part of them at a time."""

    @property
    def shape(self) -> Sequence[int]: ...
    def __getitem__(self, part: slice, /) -> torch.Tensor: ...


class WindowScores:
    """Mean scores of windows, by model and metric.

    Args:
        metrics: the metrics to measure. One that isn't built in and raises, writes to an argument, or returns
            what :class:`~quantkit.evaluation.metrics.Metric` doesn't allow, is left out from then on, with
            one warning. It gets tensors of its own, so that whatever it does to them costs nobody else.
        models: the number of models that are scored.

    Attributes:
        means: for each model, by metric: each window's mean score, a float, per run an array ``[K]``.
    """

    def __init__(self, metrics: Sequence[RegisteredMetric], models: int) -> None:
        self._metrics = {registered.metric.name: registered for registered in metrics}
        self._kept: list[dict[str, list[np.ndarray]]] = [
            {name: [] for name in self._metrics} for _ in range(models)]
        self._tokens: list[dict[str, list[np.ndarray]]] = [{} for _ in range(models)]
        self._row = 0

    @property
    def means(self) -> list[dict[str, list[np.ndarray]]]:
        """See above; metrics that were left out are missing."""
        return [{name: means[name] for name in self._metrics} for means in self._kept]

    def tokens(self, model: int) -> TokenScores:
        """Each token's scores. The metrics must have KL (or EXACT), top-1 and perplexity among them."""
        kept, key = self._tokens[model], KL.name if KL.name in self._metrics else EXACT
        windows = len(self._kept[model][key])
        kinds = ((key, np.float32), (PERPLEXITY.name, np.float32), (_LIKELIEST, np.int32), (TOP1.name, bool))
        return TokenScores(*(np.concatenate(kept[name]).reshape(windows, -1).astype(kind)
                             for name, kind in kinds))

    def add(self, model: int, reference: LogitRows, candidate: LogitRows, targets: torch.Tensor) -> None:
        """Score a window.

        Args:
            model: the number of the model, from 0.
            reference, candidate: their logits; one object if they are the same.
            targets: the tokens that came, int64 ``[T]``.

        Raises:
            ValueError: a built-in metric returned nonsense.
        """
        sums: dict[str, Any] = {}
        self._row = model
        windowed = {name for name, registered in self._metrics.items() if registered.metric.per == "window"}
        rows = -(-LOGITS // candidate.shape[1])
        parts = [(self._metrics.keys() - windowed, slice(begin, begin + rows))
                 for begin in range(0, len(targets), rows)]
        for names, part in parts + [(windowed, slice(None))] * bool(windowed):
            ours = candidate[part]
            theirs = ours if reference is candidate else reference[part]
            self._score(sums, names, theirs, ours, targets[part])
        for name in self._metrics:
            mean = sums[name] if name in windowed else sums[name] / len(targets)
            self._kept[model][name].append(mean)

    def summaries(self) -> list[dict[str, Interval]]:
        """For each model, every metric that is left, by its key.

        Raises:
            ValueError: no windows, or a built-in's values make no sense.
        """
        rows: list[dict[str, Interval]] = [{} for _ in self._kept]
        for name, registered in list(self._metrics.items()):
            try:
                values = [registered.metric.summarize(np.stack(means[name])) for means in self._kept]
            except Exception as error:
                self._drop(registered, error)
                continue
            for row, value in zip(rows, values):
                row[name] = value
        return rows

    def _score(self, sums: dict[str, Any], names: set[str], reference: torch.Tensor, candidate: torch.Tensor,
               targets: torch.Tensor) -> None:
        shared = None
        for name, registered in list(self._metrics.items()):
            if name not in names:
                continue
            try:
                if registered.builtin:
                    shared = shared or self._shared(reference, candidate, targets)
                    scores = _checked(registered.metric, *shared)
                    if registered.metric.per == "token":
                        self._keep(name, scores)
                    total = _total(registered.metric, scores)
                else:
                    total = _apart(registered.metric, _inputs(reference, candidate, targets))
                if name in sums and total.shape != sums[name].shape:
                    raise ValueError(f"it returns {total.size} statistics after {sums[name].size} before")
                sums[name] = sums[name] + total if name in sums else total
            except Exception as error:
                self._drop(registered, error)

    def _shared(self, reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> Inputs:
        self._keep(_LIKELIEST, candidate.argmax(-1))
        return _inputs(reference, candidate, targets)

    def _keep(self, name: str, scores: torch.Tensor) -> None:
        self._tokens[self._row].setdefault(name, []).append(scores.cpu().numpy())

    def _drop(self, registered: RegisteredMetric, error: Exception) -> None:
        if registered.builtin:
            raise error
        del self._metrics[registered.metric.name]
        left_out("metric", registered.metric.name, registered.owner, error)


@torch.inference_mode(False)
@torch.no_grad()
def _inputs(reference: torch.Tensor, candidate: torch.Tensor, targets: torch.Tensor) -> Inputs:
    """What a metric is given of a part of a window, in memory of its own. Tensors that are made outside
    inference mode count what is written to them."""
    ours = candidate.float().log_softmax(-1)
    theirs = ours if reference is candidate else reference.float().log_softmax(-1)
    following = torch.empty(targets.shape, dtype=targets.dtype, device=ours.device)
    return theirs, ours, following.copy_(targets)


def _apart(metric: Metric, inputs: Inputs) -> np.ndarray:
    """:func:`scored` of a plugin's metric. Raises ValueError if it writes to an argument, too."""
    versions = [tensor._version for tensor in inputs]
    total = scored(metric, *inputs)
    if [tensor._version for tensor in inputs] != versions:
        raise ValueError("score writes to an argument")
    return total


def scored(metric: Metric, reference: torch.Tensor, candidate: torch.Tensor,
           targets: torch.Tensor) -> np.ndarray:
    """The sum of a metric's scores, float64: ``[]``, per run ``[K]``; of a whole window its score.

    Raises:
        ValueError: ``score`` returned something of another type, shape or dtype, NaN, or per run infinity.
    """
    return _total(metric, _checked(metric, reference, candidate, targets))


def _checked(metric: Metric, reference: torch.Tensor, candidate: torch.Tensor,
             targets: torch.Tensor) -> torch.Tensor:
    """Scores of a type, shape and dtype that the metric may return."""
    scores = metric.score(reference, candidate, targets)
    count = len(targets)
    if not isinstance(scores, torch.Tensor):
        raise ValueError(f"score returns a {type(scores).__name__}, not a tensor")
    shape = list(scores.shape)
    if metric.per == "run" and (len(shape) != 2 or shape[0] != count or not shape[1]):
        raise ValueError(f"score returns {shape}; per run it must return [{count}, K]")
    if metric.per != "run" and shape != ([count] if metric.per == "token" else []):
        raise ValueError(f"score returns {shape}; per {metric.per} it must return "
                         f"{[count] if metric.per == 'token' else []}")
    if scores.dtype.is_complex or scores.is_sparse or scores.is_quantized:
        raise ValueError(f"score returns {scores.dtype}, no real numbers")
    return scores


def _total(metric: Metric, scores: torch.Tensor) -> np.ndarray:
    total: np.ndarray = (scores.double() if metric.per == "window" else scores.double().sum(0)).cpu().numpy()
    if np.isnan(total).any():
        raise ValueError("score returns NaN")
    if metric.per == "run" and not np.isfinite(total).all():
        raise ValueError("score returns an infinite statistic")
    return total
