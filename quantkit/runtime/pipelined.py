"""Decodes where prompts go apart, one step ahead of the host where the model can."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from quantkit.models.interfaces import LanguageModel
from quantkit.ops import gpu
from quantkit.runtime.core import NextLogits, Request, TokenResult, sampled
from quantkit.runtime.runner import ModelRunner
from quantkit.runtime.sampler import PendingTokens, sample_async
from quantkit.runtime.trace import Timing


@dataclass(frozen=True)
class _PendingStep:
    """A step that was launched and whose tokens nobody has read yet."""

    requests: list[Request]
    tokens: PendingTokens


class PipelinedDecoder:
    """Decodes steps without prompts.

    A GPU that chooses tokens itself is given its next step before the host reads them, because what the host
    does takes as long as a step of a small model. A request that turns out to have ended had a step too many.

    Results come one by one. Whoever takes them gives each to its request before taking the next one: what
    follows depends on which requests have ended.

    Args:
        model: decides whether steps can be launched ahead.
        runner: runs the steps.
        timing: counts the tokens.
    """

    def __init__(self, model: LanguageModel, runner: ModelRunner, timing: Timing) -> None:
        self._model = model
        self._runner = runner
        self._timing = timing
        self._pending: _PendingStep | None = None

    @property
    def pending(self) -> bool:
        """Whether a step was launched whose tokens nobody has read."""
        return self._pending is not None

    def forget(self) -> None:
        """Nobody waits for the pending step's tokens any more."""
        self._pending = None

    def flush(self) -> Iterator[TokenResult]:
        """Read the pending step's tokens, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            yield from self._collect(pending)

    def decode(self, requests: list[Request], all_fit: bool) -> Iterator[TokenResult]:
        """Decode one token of each of these requests.

        Args:
            requests: the requests that decode side by side.
            all_fit: no other request decodes in this step.
        """
        pending, self._pending = self._pending, None
        failure: Exception | None = None
        if (pending is not None and all_fit and pending.requests == requests
                and not any(request.tokens_left <= 1 for request in requests)):
            try:
                self._pending = self._launch(requests, pending.tokens.ids[:, None])
            except Exception as error:  # the tokens before are good
                failure = error
        if pending is not None:
            yield from self._collect(pending)
        requests = [request for request in requests if not (request.done or request.cancelled)]
        results: Iterable[TokenResult] = ()
        if failure is None and requests and self._pending is None:
            try:
                results = self._decode(requests, all_fit)
            except Exception as error:
                failure = error
        if failure is not None:
            results = [TokenResult(request, error=failure) for request in requests]
        yield from results

    def _decode(self, requests: list[Request], all_fit: bool) -> Sequence[TokenResult]:
        """Run a step whose last tokens the host knows."""
        last = torch.tensor([[request.result.token_ids[-1]] for request in requests])
        ids = gpu.sent(last, self._model.device)
        if all_fit and self._can_run_ahead(requests):
            self._pending = self._launch(requests, ids)
            return ()
        results = NextLogits(requests, self._runner.logits(requests, ids)).sample()
        self._timing.decode_tokens += len(requests)
        return results

    def _can_run_ahead(self, requests: Sequence[Request]) -> bool:
        """Whether the next step can be launched before the host reads this one's tokens."""
        return self._model.runs_ahead and not any(
            request.wants_logits or request.sampler.on_host for request in requests)

    def _launch(self, requests: list[Request], ids: torch.Tensor) -> _PendingStep:
        """Begin a step of tokens ``ids [n, 1]``, and the choice of the next ones."""
        logits = self._runner.logits(requests, ids)
        return _PendingStep(requests, sample_async(logits, [request.sampler for request in requests]))

    def _collect(self, pending: _PendingStep) -> Iterator[TokenResult]:
        """Wait for a step's tokens."""
        try:
            tokens = pending.tokens.tokens()
        except Exception as error:  # of the step: a GPU reports it when it is waited for
            self._pending = None
            for request in pending.requests:
                if not request.done:
                    yield TokenResult(request, error=error)
            return
        for request, token in zip(pending.requests, tokens):
            if not request.done:
                self._timing.decode_tokens += 1
                yield sampled(request, token)
