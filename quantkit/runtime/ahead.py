"""Decodes where prompts go apart, one step ahead of the host where the model can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantkit.models.interfaces import LanguageModel
from quantkit.ops import gpu
from quantkit.runtime.request import Request
from quantkit.runtime.runner import ModelRunner
from quantkit.runtime.sampler import PendingTokens, sample_async, sample_tokens
from quantkit.runtime.timing import Timing
from quantkit.support.errors import QuantkitError


def next_tokens(requests: Sequence[Request], logits: torch.Tensor) -> list[int | QuantkitError]:
    """The next token of each request, from ``logits [n, vocab]``, or why there is none."""
    return sample_tokens(logits, [request.sampler for request in requests],
                         [request.history if request.sampler.on_host else [] for request in requests])


@dataclass(frozen=True)
class _PendingStep:
    """A step that was launched and whose tokens nobody has read yet."""

    requests: list[Request]
    tokens: PendingTokens


class AheadDecoder:
    """Decodes steps without prompts.

    A GPU that chooses tokens itself is given its next step before the host reads them, because what the host
    does takes as long as a step of a small model. A request that turns out to have ended had a step too many.

    Args:
        model: that runs.
        runner: runs its steps.
        timing: counts tokens.
        append: called with a request, its token (or why there is none) and the logits, if they are there.
        fail: called with a request and the error that ended its step.
    """

    def __init__(self, model: LanguageModel, runner: ModelRunner, timing: Timing,
                 append: Callable[[Request, int | QuantkitError, torch.Tensor | None], None],
                 fail: Callable[[Request, Exception], None]) -> None:
        self._model, self._runner, self._timing = model, runner, timing
        self._append, self._fail = append, fail
        self._pending: _PendingStep | None = None

    @property
    def pending(self) -> bool:
        """Whether a step was launched whose tokens nobody has read."""
        return self._pending is not None

    def forget(self) -> None:
        """Nobody waits for the pending step's tokens any more."""
        self._pending = None

    def flush(self) -> list[Request]:
        """Read the pending step's tokens, if there is one; returns the requests that were in it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return []
        self._collect(pending)
        return pending.requests

    def decode(self, requests: list[Request], all_fit: bool) -> None:
        """Decode one token of each of these requests.

        Args:
            requests: that decode side by side.
            all_fit: no other request decodes in this step.
        """
        pending, self._pending = self._pending, None
        failed = None
        if (pending is not None and all_fit and pending.requests == requests
                and not any(request.at_last_token for request in requests)):
            try:
                self._pending = self._launch(requests, pending.tokens.ids[:, None])
            except Exception as error:  # the tokens before are good
                failed = error
        if pending is not None:
            self._collect(pending)
        requests = [request for request in requests if not (request.done or request.cancelled)]
        try:
            if failed is not None:
                raise failed
            if requests and self._pending is None:
                last = torch.tensor([[request.result.token_ids[-1]] for request in requests])
                ids = gpu.sent(last, self._model.device)
                if all_fit and self._can_run_ahead(requests):
                    self._pending = self._launch(requests, ids)
                else:
                    logits = self._runner.logits(requests, ids)
                    for request, token, row in zip(requests, next_tokens(requests, logits), logits):
                        self._append(request, token, row)
                    self._timing.decode_tokens += len(requests)
        except Exception as error:
            for request in requests:
                self._fail(request, error)

    def _can_run_ahead(self, requests: Sequence[Request]) -> bool:
        """Whether the next step can be launched before the host reads this one's tokens."""
        return self._model.runs_ahead and not any(
            request.wants_logits or request.sampler.on_host for request in requests)

    def _launch(self, requests: list[Request], ids: torch.Tensor) -> _PendingStep:
        """Begin a step of tokens ``ids [n, 1]``, and the choice of the next ones."""
        logits = self._runner.logits(requests, ids)
        return _PendingStep(requests, sample_async(logits, [request.sampler for request in requests]))

    def _collect(self, pending: _PendingStep) -> None:
        """Wait for a step's tokens and append them."""
        try:
            tokens = pending.tokens.tokens()
        except Exception as error:  # of the step: a GPU reports it when it is waited for
            self._pending = None
            for request in pending.requests:
                if not request.done:
                    self._fail(request, error)
            return
        for request, token in zip(pending.requests, tokens):
            if not request.done:
                self._append(request, token, None)
                self._timing.decode_tokens += 1
