"""Log-likelihood of given tokens after a context, for many requests at once.

Without a KV setting a request is one forward pass over all its tokens. With one it is what a server
would do: the context goes through the cache as a prompt, the continuation as if it had been generated.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantkit.errors import QuantkitError, UsageError
from quantkit.evaluate.feed import prefill
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.ops.dispatch import DECODE_ROWS
from quantkit.runtime.loader import LoadedModel
from quantkit.spec import KVSpec

HEAD_ROWS = 256
"""Positions whose log-probabilities are worked out at once: each is a vocabulary of float32."""
MAX_TOKENS = 16384
"""Tokens of one forward pass, padding included, whatever the batch size."""
FORCED = 64
"""Continuation tokens that go through a cache at once, at most."""

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class ScoringRequest:
    """Token ids: what is given, and what is scored after it. Neither is empty."""

    context: Tokens
    continuation: Tokens


@dataclass(frozen=True)
class ScoredContinuation:
    """Sum of the continuation's log-probabilities (natural), and whether each token was the likeliest."""

    logprob: float
    greedy: bool


@dataclass(frozen=True)
class _Wanted:
    """The scores of one request: it reads ``len(targets)`` rows from ``row`` on."""

    request: int
    row: int
    targets: Tokens


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
        loaded: the model.
        kv: ``none`` scores without a cache; any other setting, through it.
        batch: requests in one forward pass. Changes results by no more than the order of additions
            does; with a KV setting by nothing, for there a pass holds the continuations of one context.
    """

    def __init__(self, loaded: LoadedModel, kv: KVSpec | None = None, batch: int = 16) -> None:
        if batch < 1:
            raise UsageError(f"batch is {batch}", why="it must be at least 1")
        self.loaded, self.kv, self.batch = loaded, kv or KVSpec(), batch

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most."""
        return self.loaded.config.max_position_embeddings

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoringRequest],
              done: Callable[[int], None] = lambda count: None) -> list[ScoredContinuation]:
        """Score every request; a context too long for the model loses its beginning, with a warning.

        Args:
            requests: in any order; those that share all tokens but their last share the work.
            done: told how many requests were finished, after every pass.

        Returns:
            One result a request, in their order.

        Raises:
            UsageError: a request's part is empty, or its continuation longer than the model's context.
            QuantkitError: the model's output is not finite.
        """
        results: list[ScoredContinuation | None] = [None] * len(requests)
        if self.kv == KVSpec():
            self._score_plain(self._fitted(requests), results, done)
        else:
            self._score_cached(self._fitted(requests), results, done)
        return [result for result in results if result is not None]

    def _fitted(self, requests: Sequence[ScoringRequest]) -> list[ScoringRequest]:
        """Cut from the left so that all but the last token fit: the last is only predicted."""
        limit, fitted, cut = self.max_length, [], 0
        for request in requests:
            if not request.context or not request.continuation:
                raise UsageError("a request has an empty context or continuation",
                                 why="with this tokenizer its text begins or ends inside a token")
            room = limit + 1 - len(request.continuation)
            if room < 1:
                raise UsageError(f"a continuation has {len(request.continuation)} tokens",
                                 why=f"the model was made for {limit}")
            cut += len(request.context) > room
            fitted.append(ScoringRequest(request.context[-room:], request.continuation))
        if cut:
            warnings.warn(f"{cut} of {len(requests)} requests are longer than the {limit} tokens that "
                          f"{self.loaded.uri} takes; the beginnings of their contexts were cut", stacklevel=4)
        return fitted

    # -- without a cache

    def _score_plain(self, requests: Sequence[ScoringRequest], results: list[ScoredContinuation | None],
                     done: Callable[[int], None]) -> None:
        groups: dict[Tokens, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(request.context + request.continuation[:-1], []).append(index)
        # longest first: what is too much for the memory shows at once, and rows of a pass are alike
        order, start = sorted(groups, key=lambda ids: (-len(ids), ids)), 0
        while start < len(order):
            rows = max(1, min(self.batch, MAX_TOKENS // len(order[start])))
            inputs = order[start:start + rows]
            wanted: list[_Wanted] = []
            places: list[tuple[int, int]] = []
            for row, ids in enumerate(inputs):
                need = max(len(requests[index].continuation) for index in groups[ids])
                for index in groups[ids]:
                    targets = requests[index].continuation
                    wanted.append(_Wanted(index, len(places) + need - len(targets), targets))
                places += [(row, place) for place in range(len(ids) - need, len(ids))]
            hidden = self._hidden(inputs)
            at = torch.tensor(places, device=hidden.device)
            self._finish(hidden[at[:, 0], at[:, 1]], wanted, results)
            done(len(wanted))
            start += rows

    def _hidden(self, inputs: Sequence[Tokens]) -> torch.Tensor:
        """The last layer's ``[B, T, hidden]``; the head is then asked for the scored positions only."""
        return self.loaded.model.hidden(*self._padded(inputs, [0] * len(inputs)))

    def _padded(self, rows: Sequence[Tokens], starts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids and positions, int64 ``[B, T]``; padding on the right has position −1."""
        longest, device = max(map(len, rows)), self.loaded.model.device
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=device)
        at = torch.tensor([[*range(start, start + len(row)), *[-1] * (longest - len(row))]
                           for row, start in zip(rows, starts, strict=True)], device=device)
        return ids, at

    def _finish(self, rows: torch.Tensor, wanted: Sequence[_Wanted],
                results: list[ScoredContinuation | None]) -> None:
        """Read targets from what the head makes of ``rows [n, hidden]``, some of them at a time."""
        at = torch.tensor([span.row + i for span in wanted for i in range(len(span.targets))])
        targets = torch.tensor([token for span in wanted for token in span.targets])
        scores, likeliest = torch.empty(len(at), dtype=torch.float64), torch.empty(len(at), dtype=torch.bool)
        for start in range(0, len(rows), HEAD_ROWS):
            logprobs, best = self._logprobs(self.loaded.model.logits(rows[start:start + HEAD_ROWS]))
            inside = ((at >= start) & (at < start + HEAD_ROWS)).nonzero()[:, 0]
            row, token = at[inside] - start, targets[inside]
            scores[inside] = logprobs[row, token].double().cpu()
            likeliest[inside] = best[row].cpu() == token
        first = 0
        for span in wanted:
            part = slice(first, first + len(span.targets))
            results[span.request] = ScoredContinuation(float(scores[part].sum()), bool(likeliest[part].all()))
            first = part.stop

    def _logprobs(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Float32 log-probabilities of ``[n, vocab]``, and the likeliest ids ``[n]``."""
        if not (logits < torch.inf).all():
            raise QuantkitError(f"{self.loaded.uri} gives logits that are not finite",
                                why="its weights are damaged, or its activations outgrow its dtype",
                                next="quantkit verify DIR, or --dtype float32")
        return logits.float().log_softmax(-1), logits.argmax(-1)

    # -- through a cache

    def _score_cached(self, requests: Sequence[ScoringRequest], results: list[ScoredContinuation | None],
                      done: Callable[[int], None]) -> None:
        """A context is read once, then copied for each of its continuations."""
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
                    logprobs, best = self._logprobs(fed.last)
                    for index in contexts[context][fed.ids]:
                        token = requests[index].continuation[-1]
                        results[index] = ScoredContinuation(fed.logprob + float(logprobs[0, token]),
                                                            fed.greedy and int(best) == token)
                done(sum(len(contexts[context][fed.ids]) for fed in batch))
            cache.free([row])

    def _decode(self, cache: KVCache, row: int, forced: Sequence[_Forced]) -> None:
        """Feed each of these after what ``row`` holds, all of them side by side."""
        begin = cache.seen(row)
        for sequence in forced:
            sequence.row = cache.fork(row) if sequence.ids else -1
        # between two actions of the policy tokens may go together: every query sees what it would alone
        stride = math.gcd(FORCED, cache.policy.decode_interval or FORCED)
        for start in range(0, max(len(sequence.ids) for sequence in forced), stride):
            live = [sequence for sequence in forced if len(sequence.ids) > start]
            chunks = [sequence.ids[start:start + stride] for sequence in live]
            ids, positions = self._padded(chunks, [begin + start] * len(live))
            logits = self.loaded.model(ids, positions,
                                       Batch(cache, [sequence.row for sequence in live], "decode"))
            for sequence, chunk, rows in zip(live, chunks, logits, strict=True):
                logprobs, best = self._logprobs(torch.cat((sequence.last, rows[:len(chunk) - 1])))
                targets = torch.tensor(chunk, device=rows.device)
                sequence.logprob += float(logprobs.gather(1, targets[:, None]).double().sum())
                sequence.greedy &= bool((best == targets).all())
                sequence.last = rows[len(chunk) - 1:len(chunk)].clone()
        cache.free([sequence.row for sequence in forced if sequence.ids])
