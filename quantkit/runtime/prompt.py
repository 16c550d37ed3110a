"""A prompt on its way through the model: chunk by chunk, then what its KV policy does at its end."""

from __future__ import annotations

from collections.abc import Callable, Generator

import torch

from quantkit.kv.base import Phase
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
        ticket: the request.
        chunk: tokens that go through the model at once, at most. A policy that acts after every chunk does so
            after every ``chunk`` tokens, so that a request's tokens don't depend on how large chunks were.
        sizer: says how large chunks are while others decode.
        clock: seconds.

    Attributes:
        logits: ``[1, vocab]`` after the last token, once all is done.
    """

    def __init__(self, loaded: LoadedModel, cache: KVCache, ticket: Request, chunk: int, sizer: ChunkSizer,
                 clock: Callable[[], float]) -> None:
        self._loaded, self._cache, self._ticket = loaded, cache, ticket
        self._chunk, self._sizer, self._clock = chunk, sizer, clock
        self._beside, self._until = False, 0.0  # whether others wait, and when their next tokens are due
        self._last: torch.Tensor | None = None  # logits, once the prompt is read
        self._rest: Generator[int, None, None] | None = None  # of the policy's work
        self.logits: torch.Tensor | None = None

    def step(self, beside: bool) -> int:
        """Go on by a chunk, or by some of what the policy does at the prompt's end.

        Args:
            beside: others decode, and wait for this.

        Returns:
            How many tokens went through the model, if nothing else was done; else 0.
        """
        before = self._clock()
        self._beside, self._until = beside, before + self._sizer.spare
        if self._last is None:
            tokens = self._feed()
            return tokens if self._last is None else 0
        acted = False
        for tokens in self._rest or ():
            if tokens:
                return 0 if acted else tokens
            acted, took, before = True, self._clock() - before, self._clock()
            if before + took > self._until:  # the next one takes as long
                return 0
        self.logits = self._last
        return 0

    def close(self) -> None:
        """Give up what the policy has left to do, and free what that took."""
        if self._rest is not None:
            self._rest.close()

    def _portion(self) -> int:
        """Tokens that may go through the model now, in what is left of the gap."""
        return self._sizer.tokens_in(self._until - self._clock()) if self._beside else self._chunk

    def _feed(self) -> int:
        """The next tokens of the prompt; returns how many."""
        loaded, ticket = self._loaded, self._ticket
        start, length = ticket.fed, len(ticket.prompt)
        end = min(start + self._portion(), length)
        if any(policy.on_prefill == "chunk" for policy in self._cache.policies):
            end = min(end, (start // self._chunk + 1) * self._chunk)
        phase: Phase = ("prefill_end" if end == length else "prefill" if end % self._chunk == 0 else
                        "prefill_part")
        later = self._portion if self._beside and end == length else None
        batch = self._cache.batch([ticket.row], phase, later)
        ids = gpu.sent(torch.tensor([ticket.prompt[start:end]]), loaded.model.device)
        ticket.fed, logits = end, None
        if ticket.wants_prompt_logprobs:
            logits = loaded.model(ids, cache=batch)[0]
            ticket.see_prompt(logits)
        elif end == length:
            logits = loaded.model(ids, cache=batch, last=torch.tensor([end - start - 1]))
        else:  # nobody asks what follows: the head, a large part of a small model, is left out
            loaded.model.hidden(ids, cache=batch)
        if end == length:
            assert logits is not None
            self._last = logits[-1:]
            if batch.rest is None:
                self.logits = self._last
            else:
                self._last, self._rest = self._last.clone(), batch.rest
        return end - start
