"""Perplexity, KL and top-1 by position: what a setting costs as a text grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from quantkit.evaluation.metrics import KL, PERPLEXITY, TOP1, Interval
from quantkit.evaluation.quality.feed import MOST, finite, force, prefill
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.runtime.loader import LoadedModel
from quantkit.support.errors import UsageError

METRICS = (PERPLEXITY, KL, TOP1)
BucketMeans = tuple[tuple[float, ...], ...]
"""Bucket → the mean of each metric."""


@dataclass(frozen=True)
class PositionBucket:
    """One setting over a range of positions.

    Attributes:
        kv: the KV setting.
        low, high: the queries that were scored: ``low ≤ tokens before the query < high``.
        values: ``perplexity``, ``kl_mean`` and ``top1``, the last two against the full cache; intervals are
            over windows.
        kl_windows: mean KL of each window, for comparing settings window by window.
    """

    kv: str
    low: int
    high: int
    values: dict[str, Interval]
    kl_windows: tuple[float, ...]


@dataclass(frozen=True)
class WindowSums:
    """A window through all settings.

    Attributes:
        means: setting → bucket → the mean of each of :data:`METRICS`.
        kv_bytes: each setting's bytes of KV cache at the window's end.
    """

    means: tuple[BucketMeans, ...]
    kv_bytes: tuple[int, ...]


class PositionSums:
    """Sums the scores of one window by bucket.

    Args:
        edges: the positions at which buckets begin and end.
    """

    def __init__(self, edges: Sequence[int]) -> None:
        self.edges = tuple(edges)
        self._sums = [[0.0] * len(METRICS) for _ in self.edges[1:]]

    def add(self, at: int, reference: torch.Tensor, logprobs: torch.Tensor, targets: torch.Tensor) -> None:
        """Score the log-probabilities ``logprobs`` against ``reference``, float32 ``[T, vocab]``, of queries
        from position ``at`` on, whose next tokens are ``targets`` int64 ``[T]``."""
        scores = [metric.score(reference, logprobs, targets).double() for metric in METRICS]
        for sums, (low, high) in zip(self._sums, pairwise(self.edges)):
            part = slice(max(0, low - at), max(0, high - at))
            for index, score in enumerate(scores):
                sums[index] += float(score[part].sum())

    def means(self) -> BucketMeans:
        return tuple(tuple(total / (high - low) for total in sums)
                     for sums, (low, high) in zip(self._sums, pairwise(self.edges)))


def buckets_of(kv: str, edges: Sequence[int], windows: Sequence[BucketMeans]) -> list[PositionBucket]:
    """The buckets of a setting over all windows."""
    buckets = []
    for index, (low, high) in enumerate(pairwise(edges)):
        means = {metric: [window[index][number] for window in windows]
                 for number, metric in enumerate(METRICS)}
        values = {metric.name: metric.summarize(each) for metric, each in means.items()}
        buckets.append(PositionBucket(kv, low, high, values, tuple(means[KL])))
    return buckets


def edges_of(prompt: int, lengths: Sequence[int]) -> list[int]:
    """Where buckets begin and end: behind the prompt, then at every length; the last query of a window
    predicts nothing that is known.

    Raises:
        UsageError: nothing lies behind the prompt.
    """
    ends = sorted(length for length in lengths if length > prompt + 1)
    if not ends:
        raise UsageError(f"a prompt of {prompt} tokens leaves nothing to score",
                         why=f"the longest text has {max(lengths)}", next="give a smaller --prompt-tokens")
    return sorted({prompt, *ends[:-1], ends[-1] - 1})


@torch.inference_mode()
def score_window(loaded: LoadedModel, settings: Sequence[KVSpec], ids: Sequence[int], prompt: int,
                 edges: Sequence[int], fed: Callable[[int], None] = lambda count: None) -> WindowSums:
    """Teacher-force a window through every setting, side by side, and score it by position.

    The window's first tokens are its prompt, at whose end policies act; the rest is fed as if it had been
    generated. All settings are kept at once, so that no window's logits are.

    Args:
        loaded: the model in memory.
        settings: the full cache first: it is the reference.
        ids: the tokens of the window.
        prompt: tokens that aren't scored.
        edges: the borders of buckets, by :func:`edges_of`.
        fed: hears how many tokens went through a setting.

    Raises:
        QuantkitError: the model's output is not finite.
    """
    sums, kv_bytes = [PositionSums(edges) for _ in settings], [0] * len(settings)
    caches = [KVCache(loaded.config, kv, loaded.dtype, loaded.model.device) for kv in settings]
    rows = [cache.add(len(ids)) for cache in caches]
    for cache, row in zip(caches, rows):
        prefill(loaded, cache, row, ids[:prompt])
        fed(prompt)
    for start in range(prompt, len(ids) - 1, MOST):
        chunk = ids[start:min(start + MOST, len(ids) - 1)]
        targets = torch.tensor(ids[start + 1:start + 1 + len(chunk)])
        reference: torch.Tensor | None = None
        for index, (cache, row) in enumerate(zip(caches, rows)):
            logits = finite(loaded, force(loaded, cache, row, chunk, start - prompt))
            logprobs = logits.float().log_softmax(-1).cpu()
            reference = logprobs if reference is None else reference
            sums[index].add(start, reference, logprobs, targets)
            kv_bytes[index] = cache.allocated_bytes
            fed(len(chunk))
    return WindowSums(tuple(each.means() for each in sums), tuple(kv_bytes))
