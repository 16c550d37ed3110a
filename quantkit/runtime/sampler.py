"""Choosing the next token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from quantkit.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How one sequence is continued. The defaults are greedy.

    Attributes:
        max_tokens: at most so many new tokens.
        temperature: 0 is greedy.
        top_k: only the k most likely (0: all).
        top_p: only the most likely that together reach p (1: all).
        min_p: only those at least so likely as min_p × the most likely.
        repetition_penalty: divides the logit of every token already there (1: none), as in CTRL,
            https://arxiv.org/abs/1909.05858.
        seed: of this sequence's own generator; ``None`` draws one.
        stop: texts that end it; they are not part of the output.
        ignore_eos: go on after an end-of-sequence token.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for field, good, rule in (
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature <= 100, "between 0 and 100"),
            ("top_k", self.top_k >= 0, "0 (all) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", 0 < self.repetition_penalty <= 100, "above 0"),
            ("seed", self.seed is None or 0 <= self.seed < 2**63, "a non-negative 63-bit integer"),
            ("stop", all(self.stop), "non-empty texts"),
        ):
            if not good:
                raise UsageError(f"{field} is {getattr(self, field)!r}", why=f"it must be {rule}")


class Sampler:
    """One sequence's sampler; its generator is its own, so a batch's other members don't matter."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._generator = torch.Generator()
        if sampling.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(sampling.seed)

    def __call__(self, logits: torch.Tensor, history: Sequence[int]) -> int:
        """Pick from ``logits [vocab]``; ``history`` is every id so far, prompt and output."""
        scores = adjust(logits.float().cpu(), history, self.sampling)
        if self.sampling.temperature == 0:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self._generator))


def adjust(scores: torch.Tensor, history: Sequence[int], sampling: Sampling) -> torch.Tensor:
    """Penalty, temperature, top-k, top-p, min-p, in this order; excluded tokens become −inf.

    Args:
        scores: float32 ``[vocab]``; not written to.
        history: ids whose repetition is penalized.
        sampling: the settings.
    """
    if sampling.repetition_penalty != 1 and history:
        seen = torch.tensor(sorted(set(history)))
        old = scores[seen]
        penalty = sampling.repetition_penalty
        scores = scores.index_put((seen,), torch.where(old < 0, old * penalty, old / penalty))
    if sampling.temperature == 0:
        return scores
    scores = scores / sampling.temperature
    if 0 < sampling.top_k < scores.numel():
        scores = scores.masked_fill(scores < scores.topk(sampling.top_k).values[-1], -torch.inf)
    if sampling.top_p < 1:
        values, order = scores.sort(descending=True, stable=True)
        before = values.softmax(-1).cumsum(-1) - values.softmax(-1)
        scores = scores.index_fill(0, order[before >= sampling.top_p], -torch.inf)
    if sampling.min_p > 0:
        chances = scores.softmax(-1)
        scores = scores.masked_fill(chances < sampling.min_p * chances.max(), -torch.inf)
    return scores
