"""Measures the error by generated length, where every new entry of a cache comes from a compressed cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch

from quantkit.evaluation.feed import finite, force, likeliest, prefill
from quantkit.evaluation.long.journal import Journal
from quantkit.evaluation.long.positions import PositionBucket, PositionSums, buckets_of
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.runtime.loader import LoadedModel

FIRST = 16
"""The first bucket's end; each of the others ends where four times as much was generated."""


@dataclass(frozen=True)
class Drift:
    """One setting on texts that the full cache generated.

    Attributes:
        kv: the setting.
        buckets: by generated position: ``low`` tokens were generated before.
        differs: by sample, after how many equal tokens greedy generation differs from the full cache's;
            ``None``: it doesn't, as far as was generated.
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


def by_step(loaded: LoadedModel, settings: Sequence[KVSpec], prompts: torch.Tensor, tokens: int,
            fed: Callable[[int, str], None] = lambda count, kv: None,
            journal: Journal | None = None) -> list[Drift]:
    """Generate greedily with the full cache, then force every setting along the same text, token by token.

    Until a setting's likeliest token first is another than the full cache's, both have read the same: so the
    first disagreement is also where greedy generation would part. An end of sequence ends nothing here.

    Args:
        loaded: the model.
        settings: the full cache first: it writes the text.
        prompts: int64 ``[n, T]``.
        tokens: how many are generated.
        fed: told how many tokens went through a setting.
        journal: prompts whose texts an earlier run has generated.

    Raises:
        QuantkitError: the model's output is not finite.
    """
    journal, records, edges = journal or Journal(None, {}), [], steps_of(tokens)
    for number, prompt in enumerate(prompts):
        name = f"generated {number}"
        if journal.has(name):
            fed((len(prompt) + tokens) * len(settings), str(settings[-1]))
        records.append(journal.piece(name, partial(_text, loaded, settings, prompt, tokens, edges, fed)))
    drifts = []
    for index, kv in enumerate(settings):
        tokens_written = [text[index] for text in records]
        spent = [text["step_seconds"] for text in tokens_written if text["step_seconds"] is not None]
        drifts.append(Drift(str(kv), tuple(buckets_of(str(kv), edges,
                                                      [text["means"] for text in tokens_written])),
                            tuple(text["differs"] for text in tokens_written), 1 / median(spent)
                            if spent else 0.0))
    return drifts


@torch.inference_mode()
def _text(loaded: LoadedModel, settings: Sequence[KVSpec], prompt: torch.Tensor, tokens: int,
          edges: Sequence[int], fed: Callable[[int, str], None]) -> list[dict[str, Any]]:
    """The results of one text by setting: ``means``, where it first ``differs``, mean ``step_seconds``."""
    written: list[int] = []
    truth: list[torch.Tensor] = []
    buckets: list[dict[str, Any]] = []
    for kv in settings:
        cache = KVCache(loaded.config, kv, loaded.dtype, loaded.model.device)
        row, tally, seconds = cache.add(len(prompt) + tokens), PositionSums(edges), 0.0
        logits = prefill(loaded, cache, row, prompt.tolist())
        fed(len(prompt), str(kv))
        differs: int | None = None
        for step in range(tokens):
            if step:
                begun = time.perf_counter()
                logits = force(loaded, cache, row, written[step - 1:step], step - 1)
                seconds += (time.perf_counter() - begun) * (step > 1)  # the first prepares what others use
            logprobs, best = finite(loaded, logits).float().log_softmax(-1).cpu(), likeliest(loaded,
                                                                                             logits[0])
            if not buckets:
                written.append(best)
                truth.append(logprobs)
            elif differs is None and best != written[step]:
                differs = step
            tally.add(step, truth[step], logprobs, torch.tensor(written[step:step + 1]))
        fed(tokens, str(kv))
        buckets.append({"means": tally.means(), "differs": differs,
                        "step_seconds": seconds / (tokens - 2) if tokens > 2 else None})
    return buckets
