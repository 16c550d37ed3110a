"""A prompt on its way through the model: chunk by chunk, then what its KV policy does at its end."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch

from quantkit.kv.base import Phase
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.ops import gpu
from quantkit.runtime.chunk_size import ChunkSizer
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.request import Request


class Prefill:
    """Reads a request's prompt.

    Args:
        loaded: the model.
        cache: holds the request's sequence.
        request: whose prompt it is.
        chunk: tokens that go through the model at once, at most. A policy that acts after every chunk does so
            after every ``chunk`` tokens, so that a request's tokens don't depend on the sizes of chunks.
        sizer: says how large chunks are while others decode.
        clock: tells seconds.

    Attributes:
        logits: ``[1, vocab]`` after the last token, once everything is done.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, request: Request, chunk: int, sizer: ChunkSizer,
                 clock: Callable[[], float]) -> None:
        self._loaded, self._cache, self._request = loaded, cache, request
        self._chunk, self._sizer, self._clock = chunk, sizer, clock
        self._beside, self._deadline = False, 0.0  # whether others wait, and when their next tokens are due
        self._last_logits: torch.Tensor | None = None  # once the prompt is read
        self._deferred: Generator[int, None, None] | None = None  # the policy's remaining work
        self.logits: torch.Tensor | None = None

    def step(self, beside: bool) -> int:
        """Go on by a chunk, or by some of what the policy does at the prompt's end.

        Args:
            beside: others decode, and wait for this.

        Returns:
            How many tokens went through the model, if nothing else was done; else 0.
        """
        before = self._clock()
        self._beside, self._deadline = beside, before + self._sizer.spare
        if self._last_logits is None:
            tokens = self._feed()
            return tokens if self._last_logits is None else 0
        acted = False
        for tokens in self._deferred or ():
            if tokens:
                return 0 if acted else tokens
            acted, duration, before = True, self._clock() - before, self._clock()
            if before + duration > self._deadline:  # the next layer takes as long
                return 0
        self.logits = self._last_logits
        return 0

    def close(self) -> None:
        """Give up the policy's remaining work, and free what that took."""
        if self._deferred is not None:
            self._deferred.close()

    def _token_budget(self) -> int:
        """Tokens that may go through the model now, in what is left of the gap."""
        return self._sizer.tokens_in(self._deadline - self._clock()) if self._beside else self._chunk

    def _feed(self) -> int:
        """Feed the next chunk; returns its tokens."""
        model, request = self._loaded.model, self._request
        start, length = request.computed_tokens, len(request.prompt)
        end = min(start + self._token_budget(), length)
        if any(layer.policy.on_prefill == "chunk" for layer in self._cache.layers):
            end = min(end, (start // self._chunk + 1) * self._chunk)
        phase: Phase = ("prefill_end" if end == length else "prefill" if end % self._chunk == 0 else
                        "prefill_part")
        defer = self._token_budget if self._beside and end == length else None
        batch = Batch(self._cache, [request.sequence], phase, defer)
        ids = gpu.sent(torch.tensor([request.prompt[start:end]]), model.device)
        request.computed_tokens, logits = end, None
        if request.wants_prompt_logprobs:
            logits = model(ids, cache=batch)[0]
            request.score_prompt(logits)
        elif end == length:
            logits = model(ids, cache=batch, last=torch.tensor([end - start - 1]))
        else:  # nobody needs what follows: skip the head, which is a large part of a small model
            model.hidden(ids, cache=batch)
        if end == length:
            assert logits is not None
            self._last_logits = logits[-1:]
            if batch.deferred is None:
                self.logits = self._last_logits
            else:
                self._last_logits, self._deferred = self._last_logits.clone(), batch.deferred
        return end - start
