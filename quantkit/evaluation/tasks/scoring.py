"""Log-likelihood of given tokens after a context, for many requests at once.

Requests share the work for all tokens that they begin with: choices their question, questions their examples.
Where the KV setting keeps everything and encodes each token by itself, whatever two requests share is
computed once, and many requests go side by side. With any other setting it is what a server would do: a
context goes through the cache as a prompt, at whose end the policy acts, and the continuations as if they had
been generated.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from quantkit.evaluation.quality.blocks import (
    MaskedText,
    begin_text,
    masked_logits,
    masked_states,
    orders_of,
    side_by_side,
)
from quantkit.evaluation.quality.feed import force, prefill
from quantkit.evaluation.tasks.prefix_plan import Tokens
from quantkit.evaluation.tasks.prefix_scores import LOGITS, PrefixScorer, Target, token_logprobs
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.spec import KVSpec
from quantkit.models.decoder import padded_rows
from quantkit.ops.dispatch import DECODE_ROWS
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.modules_model import ModulesModel
from quantkit.support.errors import UsageError

BATCH = 64
"""Sequences side by side, unless told otherwise."""
DRAWS, DRAWN_TOKENS = 8, 64  # measurements are kept by them
"""Of a model that writes blocks: how often a continuation is masked at random, at most; longer ones less
often, so that about as many tokens are predicted. With so few orders or fewer, each is taken once."""
FORCED = 64
"""Continuation tokens that go through a cache at once, at most."""


@dataclass(frozen=True)
class ScoringRequest:
    """Token ids: what is given, and what is scored after it. Neither is empty."""

    context: Tokens
    continuation: Tokens


@dataclass(frozen=True)
class ScoredContinuation:
    """Sum of the continuation's log-probabilities (natural), and whether each token was the likeliest. Of a
    model that writes blocks the first is a bound, estimated: the log-likelihood is at least as much; and the
    second is asked where tokens are masked, which says nothing of what decoding writes."""

    logprob: float
    greedy: bool


def _draws(tokens: int) -> int:
    """How many orders a continuation is uncovered in, at most."""
    return max(1, min(DRAWS, DRAWN_TOKENS // tokens))


@dataclass
class _Forced:
    """Tokens on their way through the cache: their score so far, and the logits ``[1, vocab]`` after the
    last one. ``row`` is their sequence, if there are any."""

    ids: Tokens
    last: torch.Tensor
    row: int = -1
    logprob: float = 0.0
    greedy: bool = True


class Scorer:
    """Scores requests with one model and one way to keep its KV cache.

    Args:
        loaded: the model in memory.
        kv: how keys and values are kept.
        batch: sequences side by side, at most. The programs on a CPU and on a GPU give a request the same
            score in any company; a model that runs operation by operation changes it by no more than another
            order of additions does.
    """

    def __init__(self, loaded: LoadedModel, kv: KVSpec | None = None, batch: int = BATCH) -> None:
        if batch < 1:
            raise UsageError(f"batch is {batch}", why="it must be at least 1")
        self.loaded = loaded
        self.kv = kv or KVSpec()
        self.batch = batch

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most, the last one of a continuation not counted; where blocks are
        written, it is read too."""
        return self.loaded.config.max_position_embeddings - (self.loaded.config.diffusion is not None)

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoringRequest],
              done: Callable[[int], None] = lambda count: None) -> list[ScoredContinuation]:
        """Score every request; a context too long for the model loses its beginning, with a warning.

        Args:
            requests: in any order; those that begin alike share the work for that.
            done: told how many requests were finished, whenever some were.

        Returns:
            One result a request, in their order.

        Raises:
            UsageError: a request's part is empty, or its continuation longer than the model's context.
            QuantkitError: the model's output is not finite.
        """
        fitted = self._fitted(requests)
        if not fitted:
            return []
        if isinstance(self.loaded.model, ModulesModel):
            return self._score_texts(self.loaded.model, fitted, done)
        if self.loaded.config.diffusion is not None:
            return self._score_blocks(fitted, done)
        sharing = PrefixScorer(self.loaded, self.kv, self.batch)
        return (self._score_sharing(sharing, fitted, done) if sharing.takes_back
                else self._score_cached(fitted, done))

    def _fitted(self, requests: Sequence[ScoringRequest]) -> list[ScoringRequest]:
        """Cut from the left so that all but the last token fit: the last is only predicted."""
        limit = self.max_length
        fitted = []
        cut = 0
        for request in requests:
            if not request.context or not request.continuation:
                raise UsageError("a request has an empty context or continuation",
                                 why="with this tokenizer its text begins or ends inside a token")
            room = limit + 1 - len(request.continuation)
            if room < 1:
                raise UsageError(f"a continuation has {len(request.continuation)} tokens",
                                 why=f"the model reads {limit}")
            cut += len(request.context) > room
            fitted.append(ScoringRequest(request.context[-room:], request.continuation))
        if cut:
            warnings.warn(f"{cut} of {len(requests)} requests are longer than the {limit} tokens that "
                          f"{self.loaded.uri} takes; the beginnings of their contexts were cut", stacklevel=4)
        return fitted

    # -- where sequences aren't read side by side

    def _score_texts(self, model: ModulesModel, requests: Sequence[ScoringRequest],
                     done: Callable[[int], None]) -> list[ScoredContinuation]:
        """Texts one by one, each as a whole, or through a cache of its own."""
        results = []
        for request in requests:
            fed = request.continuation[:-1]
            if self.kv == KVSpec():
                hidden = model.hidden(torch.tensor([request.context + fed]))[0]
                logits = model.logits(hidden[len(request.context) - 1:])
            else:
                cache = KVCache(model.config, self.kv, model.dtype, model.device)
                row = cache.add(len(request.context) + len(fed))
                logits = prefill(self.loaded, cache, row, request.context)
                if fed:
                    logits = torch.cat([logits, force(self.loaded, cache, row, fed)])
            scores = self._scores(logits, range(len(request.continuation)), request.continuation)
            results.append(ScoredContinuation(sum(scores[0]), all(scores[1])))
            done(1)
        return results

    # -- where blocks are written

    def _score_blocks(self, requests: Sequence[ScoringRequest],
                      done: Callable[[int], None]) -> list[ScoredContinuation]:
        """A context is read once, then copied for each of its continuations and each choice of masks."""
        results: dict[int, ScoredContinuation] = {}
        contexts: dict[Tokens, list[int]] = {}
        for index, request in enumerate(requests):
            contexts.setdefault(request.context, []).append(index)
        cache = KVCache(self.loaded.config, self.kv, self.loaded.dtype, self.loaded.model.device)
        for context in sorted(contexts, key=lambda ids: (-len(ids), ids)):
            row = begin_text(self.loaded, cache, context, len(context))
            masked = [(index, text, order) for index in contexts[context]
                      for text in [(*context, *requests[index].continuation)]
                      for order in orders_of(self.loaded, text, len(context),
                                             _draws(len(requests[index].continuation)))]
            scores: dict[int, list[tuple[float, bool]]] = {}
            longest = max(len(requests[index].continuation) for index in contexts[context])
            count = min(self.batch, side_by_side(cache, longest))
            for start in range(0, len(masked), count):
                part = masked[start:start + count]
                texts = [MaskedText(cache.fork(row), text, len(context), order) for _, text, order in part]
                for (index, *_), states in zip(part, masked_states(self.loaded, cache, texts), strict=True):
                    scores.setdefault(index, []).append(
                        self._masked_score(states, requests[index].continuation))
                cache.free([text.row for text in texts])
            cache.free([row])
            for index, drawn in scores.items():
                logprob = sum(logprob for logprob, _ in drawn) / len(drawn)
                results[index] = ScoredContinuation(logprob, all(greedy for _, greedy in drawn))
            done(len(scores))
        return [results[index] for index in range(len(requests))]

    def _masked_score(self, states: torch.Tensor, tokens: Tokens) -> tuple[float, bool]:
        """Log-probabilities of tokens in all, and whether each is the likeliest where it was masked."""
        logprob, likeliest, rows = 0.0, True, max(1, LOGITS // self.loaded.config.vocab_size)
        for start in range(0, len(tokens), rows):
            part = tokens[start:start + rows]
            logits = masked_logits(self.loaded, states[start:start + rows])
            logprobs, greedy = self._scores(logits, range(len(part)), part)
            logprob, likeliest = logprob + sum(logprobs), likeliest and all(greedy)
        return logprob, likeliest

    # -- where tokens can be taken back

    def _score_sharing(self, sharing: PrefixScorer, requests: Sequence[ScoringRequest],
                       done: Callable[[int], None]) -> list[ScoredContinuation]:
        sequences: dict[Tokens, int] = {}
        targets: list[Target] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = request.context + request.continuation[:-1]
            sequence = sequences.setdefault(ids, len(sequences))
            targets += [Target(sequence, place, token)
                        for place, token in enumerate(request.continuation, len(request.context) - 1)]
            owners += [number] * len(request.continuation)
        owner_of, missing = np.array(owners, np.int64), np.bincount(owners, minlength=len(requests))

        def count(numbers: npt.NDArray[np.int64]) -> None:
            whose = owner_of[numbers]
            np.subtract.at(missing, whose, 1)
            if finished := int((missing[np.unique(whose)] == 0).sum()):
                done(finished)

        logprobs, greedy = sharing.score(list(sequences), targets, count)
        ends = np.cumsum([len(request.continuation) for request in requests])[:-1]
        return [ScoredContinuation(float(part.sum()), bool(all_greedy.all()))
                for part, all_greedy in zip(np.split(logprobs, ends), np.split(greedy, ends))]

    # -- where they can't

    def _score_cached(self, requests: Sequence[ScoringRequest],
                      done: Callable[[int], None]) -> list[ScoredContinuation]:
        """A context is read once, then copied for each of its continuations."""
        results: dict[int, ScoredContinuation] = {}
        contexts: dict[Tokens, dict[Tokens, list[int]]] = {}
        for index, request in enumerate(requests):
            contexts.setdefault(request.context, {}).setdefault(request.continuation[:-1], []).append(index)
        cache = KVCache(self.loaded.config, self.kv, self.loaded.dtype, self.loaded.model.device)
        for context in sorted(contexts, key=lambda ids: (-len(ids), ids)):
            row = cache.add(len(context) + max(map(len, contexts[context])))
            first = prefill(self.loaded, cache, row, context)
            forced = sorted(contexts[context])
            for start in range(0, len(forced), DECODE_ROWS):
                batch = [_Forced(ids, first) for ids in forced[start:start + DECODE_ROWS]]
                self._decode(cache, row, batch)
                for fed in batch:
                    indices = contexts[context][fed.ids]
                    ends = [requests[index].continuation[-1] for index in indices]
                    scores = self._scores(fed.last, [0] * len(ends), ends)
                    for index, logprob, greedy in zip(indices, *scores):
                        results[index] = ScoredContinuation(fed.logprob + logprob, fed.greedy and greedy)
                done(sum(len(contexts[context][fed.ids]) for fed in batch))
            cache.free([row])
        return [results[index] for index in range(len(requests))]

    def _decode(self, cache: KVCache, row: int, forced: Sequence[_Forced]) -> None:
        """Feed each of these after what ``row`` holds, all of them side by side."""
        for sequence in forced:
            sequence.row = cache.fork(row) if sequence.ids else -1
        # between two actions of the policy tokens may go together: every query sees what it would alone
        stride = math.gcd(FORCED, cache.policy.decode_interval or FORCED)
        for start in range(0, max(len(sequence.ids) for sequence in forced), stride):
            live = [sequence for sequence in forced if len(sequence.ids) > start]
            chunks = [sequence.ids[start:start + stride] for sequence in live]
            batch = Batch(cache, [sequence.row for sequence in live], "decode")
            ids, positions, _ = padded_rows(chunks, batch, self.loaded.model.device)
            logits = self.loaded.model(ids, positions, batch)
            for sequence, chunk, rows in zip(live, chunks, logits, strict=True):
                read = torch.cat((sequence.last, rows[:len(chunk) - 1]))
                logprobs, greedy = self._scores(read, range(len(chunk)), chunk)
                sequence.logprob += sum(logprobs)
                sequence.greedy &= all(greedy)
                sequence.last = rows[len(chunk) - 1:len(chunk)].clone()
        cache.free([sequence.row for sequence in forced if sequence.ids])

    def _scores(self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int]
                ) -> tuple[list[float], list[bool]]:
        """Log-probabilities of tokens, each in a row of ``logits``, and which are the likeliest."""
        logprobs, greedy = token_logprobs(self.loaded, logits, torch.tensor([*rows]), torch.tensor([*tokens]))
        return logprobs.tolist(), greedy.tolist()
