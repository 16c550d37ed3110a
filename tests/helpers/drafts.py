"""Drafts that are known to be right, but for some tokens, and engines with them."""

from __future__ import annotations

import random
from typing import ClassVar

from quantkit.kv.spec import parse_kv
from quantkit.runtime.drafting.base import Drafter, DraftSource
from quantkit.runtime.engine import Engine


class Scripted(Drafter):
    """Knows the answers, and spoils some tokens of its drafts."""

    name: ClassVar[str] = "scripted"
    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    wrong: float = 0.3
    seed: int = 0

    def start(self, target):
        return Script(self, target.config.vocab_size)


class Script(DraftSource):
    def __init__(self, drafter, vocab):
        self._drafter, self._vocab, self._random = drafter, vocab, random.Random(drafter.seed)
        self.ended = []

    def begin(self, text):
        text.state = list(text.tokens)

    def propose(self, texts, limits):
        return [self._draft(text, limit) for text, limit in zip(texts, limits)]

    def _draft(self, text, limit):
        chance = self._random
        prompt = next(prompt for prompt in self._drafter.answers if text.tokens[:len(prompt)] == list(prompt))
        answer = self._drafter.answers[prompt][len(text.tokens) - len(prompt):]
        return [token if chance.random() > self._drafter.wrong else chance.randrange(self._vocab)
                for token in answer[:chance.randint(0, limit)]]

    def end(self, text):
        self.ended.append(text.state)


def run(loaded, prompts, samplings, kv, drafter=None, preempts=False, **options):
    """Each request's tokens with their log-probabilities, and what became of drafts; that a fixed memory was
    too small is asserted where ``preempts`` says so."""
    engine = Engine(loaded, kv=None if kv is None else parse_kv(kv), max_batch=4, drafter=drafter, **options)
    results = [[] for _ in prompts]
    requests = [engine.submit(prompt, sampling, logprobs=2, on_token=result.append)
                for prompt, sampling, result in zip(prompts, samplings, results)]
    while engine.step():
        pass
    assert (engine.stats()["preemptions"] > 0) == preempts
    engine.close()
    for request, result in zip(requests, results):
        assert [token.id for token in result] == request.result.token_ids
    return results, engine.speculator and engine.speculator.counts


def scripted(prompts, results, **options):
    Scripted.answers.clear()
    Scripted.answers.update({tuple(prompt): [token.id for token in result]
                             for prompt, result in zip(prompts, results)})
    return Scripted(**options)
