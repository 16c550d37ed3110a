"""Biases and penalties, which change logits before a token is chosen: on the host, and on a GPU.

Both do the same operations in the same order on float32 numbers, so that they give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quantkit.ops import gpu

if TYPE_CHECKING:
    from quantkit.runtime.sampler import Sampler, Sampling

_LARGEST = torch.finfo(torch.float32).max
_PROMPT = 1 << 24
"""What a token of the prompt counts, beside its times in the answer."""


def change_logits(scores: torch.Tensor, history: Sequence[int], sampling: Sampling,
                  prompt_tokens: int = 0) -> torch.Tensor:
    """Bias and penalties, in vLLM's order: bias, repetition, frequency, presence.

    Args:
        scores: float32 ``[vocab]``, finite; not written to.
        history: every id so far, prompt and answer.
        prompt_tokens: the place at which the answer begins in ``history``.

    Returns:
        float32 ``[vocab]``, finite.
    """
    if sampling.logit_bias:
        ids, biases = zip(*sampling.logit_bias)
        scores = scores.index_add(0, torch.tensor(ids), torch.tensor(biases, dtype=scores.dtype))
    if sampling.repetition_penalty != 1 and history:
        seen = torch.tensor(sorted(set(history)))
        old = scores[seen]
        penalty = sampling.repetition_penalty
        scores = scores.index_put((seen,), torch.where(old < 0, old * penalty, old / penalty))
    if (sampling.frequency_penalty or sampling.presence_penalty) and len(history) > prompt_tokens:
        seen, counts = torch.tensor(history[prompt_tokens:]).unique(return_counts=True)
        scores = scores.index_add(0, seen, -(counts * sampling.frequency_penalty
                                             + sampling.presence_penalty).float())
    # a penalty far from 1 may lead out of float32's range
    return scores.clamp(-_LARGEST, _LARGEST) if sampling.has_logit_changes else scores


@dataclass(frozen=True)
class CountedTokens:
    """How often a sequence has each token, in a row of a table on a GPU, int32 ``[n, vocab]``."""

    table: torch.Tensor
    row: int


def change_logits_there(logits: torch.Tensor, samplers: Sequence[Sampler],
                        histories: Sequence[Sequence[int]]) -> torch.Tensor:
    """The same where logits ``[n, vocab]`` are, for sequences whose last tokens the host may not know yet.

    Args:
        samplers: each keeps its sequence's counts from its first token on.
        histories: every id so far, of those that keep none yet.

    Returns:
        float32 ``[n, vocab]``; what isn't finite stays so.
    """
    before = logits.float()
    scores = before.clone()
    settings = [sampler.sampling for sampler in samplers]
    biases = [(row, token, bias) for row, sampling in enumerate(settings)
              for token, bias in sampling.logit_bias]
    if biases:
        rows, ids, numbers = zip(*biases)
        places = gpu.sent(torch.tensor([rows, ids]), logits.device)
        scores.index_put_((places[0], places[1]), gpu.sent(torch.tensor(numbers), logits.device),
                          accumulate=True)
    counts = _table(samplers, histories, logits)
    repetition, frequency, presence = gpu.sent(torch.tensor(
        [[sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty]
         for sampling in settings]), logits.device).T[:, :, None]
    changed = torch.where(scores < 0, scores * repetition, scores / repetition)
    scores = torch.where(counts > 0, changed, scores)
    answered = counts % _PROMPT
    lower = answered * frequency + presence
    scores = torch.where(answered > 0, scores - lower, scores).clamp_(-_LARGEST, _LARGEST)
    return torch.where(before.isfinite(), scores, before)


def count_tokens(samplers: Sequence[Sampler], ids: torch.Tensor) -> None:
    """Count the tokens ``[n]`` that were chosen for these sequences, whose logits were changed last."""
    counts = samplers[0].counts
    assert counts is not None
    counts.table.scatter_add_(1, ids[:, None], torch.ones_like(ids, dtype=torch.int32)[:, None])


def _table(samplers: Sequence[Sampler], histories: Sequence[Sequence[int]],
           logits: torch.Tensor) -> torch.Tensor:
    """Counts of these sequences, in this order, in one table: the last step's, or a new one."""
    last = samplers[0].counts
    if last is not None and len(last.table) == len(samplers) and all(
            sampler.counts is not None and sampler.counts.table is last.table and sampler.counts.row == row
            for row, sampler in enumerate(samplers)):
        return last.table
    table = torch.stack([
        _counted(history, sampler.prompt_tokens, logits) if sampler.counts is None
        else sampler.counts.table[sampler.counts.row] for sampler, history in zip(samplers, histories)])
    for row, sampler in enumerate(samplers):
        sampler.counts = CountedTokens(table, row)
    return table


def _counted(history: Sequence[int], prompt_tokens: int, logits: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(torch.tensor(history[prompt_tokens:], dtype=torch.int64),
                            minlength=logits.shape[1]).to(torch.int32)
    counts[torch.tensor(history[:prompt_tokens], dtype=torch.int64)] += _PROMPT
    return gpu.sent(counts, logits.device)
