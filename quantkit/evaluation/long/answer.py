"""Asks a model about contexts in a KV cache, before or after policies have run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from quantkit.evaluation.long.items import LongItem, Question
from quantkit.evaluation.quality.feed import force, likeliest, prefill
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.memory.scratch import prompt_portion

When = Literal["known", "later"]
"""The question is part of the prompt at whose end policies act, or comes when they have acted: they could not
know what will be asked (the query-agnostic setting)."""
MORE = 4
"""Tokens beyond the answer's own that a model may write."""


@dataclass(frozen=True)
class Answer:
    """What a model made of one question.

    Attributes:
        right: the greedy answer begins with the right one, and not as part of a longer word or number.
        logprob: natural log-probability of the right answer's tokens, teacher-forced, summed.
        text: the greedy answer.
    """

    right: bool
    logprob: float
    text: str


@dataclass(frozen=True)
class Answers:
    """Of all questions about a context, in their order.

    Attributes:
        when: the moment at which the questions came.
        answers: one a question.
        kv_bytes: of the pages that the cache held for the prompt at its end, policies and codecs included;
            for ``known`` with the first question.
    """

    when: When
    answers: tuple[Answer, ...]
    kv_bytes: int


class LongContextModel:
    """One model with one KV setting.

    A context is read once, in the engine's chunks; every question goes to a copy of it. The answers are those
    of the engine for the whole prompt: how a prompt is cut changes nothing (but for a policy that acts
    after every chunk with a codec whose tokens wait).

    Args:
        loaded: the model in memory.
        kv: how keys and values are kept.
    """

    def __init__(self, loaded: LoadedModel, kv: KVSpec) -> None:
        self.loaded, self.kv = loaded, kv
        self.policy_acts = not KVCache(loaded.config, kv, loaded.dtype, loaded.model.device).policy.keeps_all

    @torch.inference_mode()
    def read(self, item: LongItem, whens: Sequence[When] = ("known", "later"),
             fed: Callable[[int], None] = lambda count: None) -> list[Answers]:
        """Answer every question of a context.

        Args:
            item: the context and its questions.
            whens: the moments at which questions come. Where nothing is ever dropped both are the same, and
                only the first is asked.
            fed: told how many tokens of the context were read.

        Raises:
            QuantkitError: the model's output is not finite.
        """
        whens = whens if self.policy_acts else whens[:1]
        loaded, context = self.loaded, item.context
        cache = KVCache(loaded.config, self.kv, loaded.dtype, loaded.model.device)
        row = cache.add(item.length + MORE)
        # what comes before the last chunk is the same whenever the question comes
        portion = prompt_portion(loaded.model, cache)
        last = (len(context) - 1) // portion * portion
        for start in range(0, last, portion):
            prefill(loaded, cache, row, context[start:start + portion], ends=False)
            fed(portion)
        answers_by_moment = []
        for when in whens:
            fork = cache.fork(row) if len(whens) > 1 else row
            prefill(loaded, cache, fork, context[last:], ends=when == "later")
            kv_bytes = cache.bytes_of(fork)
            answers: list[Answer] = []
            for question in item.questions:
                answer, position = self._ask(cache, fork, question, when)
                kv_bytes = position if when == "known" and not answers else kv_bytes
                answers.append(answer)
            answers_by_moment.append(Answers(when, tuple(answers), kv_bytes))
            cache.free([fork])
        fed(len(context) - last)
        return answers_by_moment

    def _ask(self, cache: KVCache, context: int, question: Question, when: When) -> tuple[Answer, int]:
        """The answer to one question, and the bytes of its sequence at the question's end."""
        row, last = self._question(cache, context, question, when)
        kv_bytes = cache.bytes_of(row)
        done = len(question.ids) if when == "later" else 0
        after = force(self.loaded, cache, row, question.answer, done)
        cache.free([row])
        rows = torch.cat((last, after))
        best = [likeliest(self.loaded, logits) for logits in rows]
        targets = torch.tensor(question.answer, device=rows.device)[:, None]
        logprob = float(rows[:-1].float().log_softmax(-1).gather(-1, targets).double().sum())
        # as long as the likeliest token is the answer's next, greedy decoding reads what was forced
        if best[:-1] == list(question.answer):
            ids = [*question.answer, best[-1]]
        else:
            ids = self._greedy(cache, context, question, when)
        text = self.loaded.tokenizer.decode(self._ended(ids)).strip()
        return Answer(_begins(text, question.text), logprob, text), kv_bytes

    def _question(self, cache: KVCache, context: int, question: Question,
                  when: When) -> tuple[int, torch.Tensor]:
        """A copy of the context with the question, and logits ``[1, vocab]`` after it."""
        row = cache.fork(context)
        if when == "known":
            logits = prefill(self.loaded, cache, row, question.ids)
        else:
            logits = force(self.loaded, cache, row, question.ids)[-1:]
        return row, logits

    def _greedy(self, cache: KVCache, context: int, question: Question, when: When) -> list[int]:
        """What the model writes, as long as an answer may be."""
        row, logits = self._question(cache, context, question, when)
        ids: list[int] = []
        while len(ids) < len(question.answer) + MORE:
            ids.append(likeliest(self.loaded, logits[-1]))
            logits = force(self.loaded, cache, row, ids[-1:], len(ids) - 1 + (
                len(question.ids) if when == "later" else 0))
        cache.free([row])
        return ids

    def _ended(self, ids: Sequence[int]) -> list[int]:
        """Up to where the model ends its answer."""
        prefix: list[int] = []
        for token in ids:
            if token in self.loaded.tokenizer.eos_ids:
                break
            prefix.append(token)
        return prefix


def _begins(text: str, answer: str) -> bool:
    """Whether a text begins with an answer that ends where a word or number does."""
    return text.startswith(answer) and not text[len(answer):len(answer) + 1].isalnum()
