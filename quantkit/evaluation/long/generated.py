"""Measures the error by generated length, where every new entry of a cache comes from a compressed cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from quantkit.evaluation.long.positions import BucketMeans, PositionBucket, PositionSums, buckets_of
from quantkit.evaluation.quality.feed import finite, force, likeliest, prefill
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.runtime.loader import LoadedModel

FIRST = 16
"""The first bucket's end; each of the others ends where four times as much was generated."""


@dataclass(frozen=True)
class FollowedText:
    """One setting on a text that the full cache generated.

    Attributes:
        means: bucket → the mean of each metric.
        differs: the number of equal tokens after which greedy generation differs from the full cache's;
            ``None``: it doesn't, as far as was generated.
        step_seconds: mean time of a token but for the first; ``None``: there are too few.
    """

    means: BucketMeans
    differs: int | None
    step_seconds: float | None


@dataclass(frozen=True)
class Drift:
    """One setting on all texts that the full cache generated.

    Attributes:
        kv: the KV setting.
        buckets: buckets by generated position: ``low`` tokens were generated before.
        differs: a number for each text, as in :class:`FollowedText`.
        decode_tok_s: tokens a second, one at a time, but for each text's first: the median text's.
    """

    kv: str
    buckets: tuple[PositionBucket, ...]
    differs: tuple[int | None, ...]
    decode_tok_s: float


def steps_of(tokens: int) -> list[int]:
    """Where buckets of generated text begin and end: 0, 16, 64, 256, …, ``tokens``."""
    edges, end = [0], FIRST
    while end < tokens:
        edges.append(end)
        end *= 4
    return [*edges, tokens]


def drifts_of(settings: Sequence[str], tokens: int, texts: Sequence[Sequence[FollowedText]]) -> list[Drift]:
    """What all texts say of each setting.

    Args:
        settings: the full cache first.
        tokens: the number of tokens that were generated.
        texts: prompt → setting → what became of it.
    """
    drifts = []
    for index, kv in enumerate(settings):
        followed = [text[index] for text in texts]
        spent = [text.step_seconds for text in followed if text.step_seconds is not None]
        buckets = buckets_of(kv, steps_of(tokens), [text.means for text in followed])
        drifts.append(Drift(kv, tuple(buckets), tuple(text.differs for text in followed),
                            1 / median(spent) if spent else 0.0))
    return drifts


@torch.inference_mode()
def follow_text(loaded: LoadedModel, settings: Sequence[KVSpec], prompt: Sequence[int], tokens: int,
                fed: Callable[[int], None] = lambda count: None) -> list[FollowedText]:
    """Generate greedily with the full cache, then force every setting along the same text, token by token.

    Until a setting's likeliest token first is another than the full cache's, both have read the same: so the
    first disagreement is also where greedy generation would part. An end of sequence ends nothing here.

    Args:
        loaded: the model in memory.
        settings: the full cache first: it writes the text.
        prompt: the prompt's token ids.
        tokens: the number of tokens that are generated.
        fed: hears how many tokens went through a setting.

    Raises:
        QuantkitError: the model's output is not finite.
    """
    written: list[int] = []
    truth: list[torch.Tensor] = []
    followed: list[FollowedText] = []
    for kv in settings:
        cache = KVCache(loaded.config, kv, loaded.dtype, loaded.model.device)
        row = cache.add(len(prompt) + tokens)
        sums = PositionSums(steps_of(tokens))
        seconds = 0.0
        logits = prefill(loaded, cache, row, prompt)
        fed(len(prompt))
        differs: int | None = None
        for step in range(tokens):
            if step:
                begun = time.perf_counter()
                logits = force(loaded, cache, row, written[step - 1:step], step - 1)
                seconds += (time.perf_counter() - begun) * (step > 1)  # the first prepares what others use
            logprobs = finite(loaded, logits).float().log_softmax(-1).cpu()
            best = likeliest(loaded, logits[0])
            if not followed:
                written.append(best)
                truth.append(logprobs)
            elif differs is None and best != written[step]:
                differs = step
            sums.add(step, truth[step], logprobs, torch.tensor(written[step:step + 1]))
        fed(tokens)
        followed.append(FollowedText(sums.means(), differs, seconds / (tokens - 2) if tokens > 2 else None))
    return followed
