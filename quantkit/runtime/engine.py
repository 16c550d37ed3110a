"""Continuous batching: requests join and leave at any step, over one model and one KV cache."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantkit.errors import QuantkitError, UsageError
from quantkit.kv.batch import Batch
from quantkit.kv.cache import KVCache
from quantkit.kv.reservation import PageReservation
from quantkit.ops import gpu
from quantkit.runtime.chunk_size import ChunkSizer
from quantkit.runtime.gpu.memory import spare_bytes
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.prompt import Prefill
from quantkit.runtime.request import Request, TokenInfo, check_request
from quantkit.runtime.sampler import PendingTokens, Sampling, sample_async, sample_tokens
from quantkit.runtime.scheduler import EngineClosed, EngineFull, Scheduler
from quantkit.runtime.timing import Timing
from quantkit.spec import KVSpec
from quantkit.structure.base import TokenConstraint

PREFILL_CHUNK = 512
"""Prompt tokens that go through the model at once, at most; other requests decode between two chunks."""


@dataclass(frozen=True)
class _PendingStep:
    """A step that was launched and whose tokens nobody has read yet."""

    requests: list[Request]
    tokens: PendingTokens


class Engine:
    """Runs requests over one model.

    Each step takes one chunk of one prompt through the model, then decodes one token of every request behind
    its prompt; :class:`~quantkit.runtime.scheduler.Scheduler` says which. A request's tokens don't depend on
    other
    requests: prompts go alone, and decoding gives each row the bits that it gets alone.

    The caller either calls :meth:`step` itself, or :meth:`start`\\ s a thread that does. The model belongs to
    that thread. :meth:`submit` and ``Request.cancel`` may be called from any.

    Args:
        loaded: the model.
        kv: how keys and values are kept; by default as the model's checkpoint says.
        max_batch: requests that decode side by side.
        max_queue: requests that may wait.
        memory: bytes that the KV cache may take. All pages are taken at once, and a request waits until there
            are enough for it. By default the cache grows and shrinks; on a GPU it takes what memory is left.
        context: tokens of the longest request, by default the model's context. The cache never takes more
            than all requests of this length need.
        max_itl: seconds between two tokens of a request while another's prompt is read (inter-token latency);
            :class:`~quantkit.runtime.chunk_size.ChunkSizer` sizes the prompt's chunks for that. By default,
            and with a model whose results depend on how a prompt is cut, chunks have :data:`PREFILL_CHUNK`
            tokens.
        clock: tells seconds.

    Attributes:
        loaded: the model.
        cache: the KV cache.
        reservation: which request has how many of its pages, if its size is fixed.
        max_itl: as given, or ``None`` with a model whose results depend on how a prompt is cut.
        timing: of all steps so far.
    """

    def __init__(self, loaded: LoadedModel, *, kv: KVSpec | None = None, max_batch: int = 8,
                 max_queue: int = 64, memory: int | None = None, context: int | None = None,
                 max_itl: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        for name, value in (("max_batch", max_batch), ("max_queue", max_queue)):
            if value < 1:
                raise UsageError(f"{name} is {value}", why="it must be at least 1")
        self.loaded, self._max_batch, self._max_queue = loaded, max_batch, max_queue
        self.cache = KVCache(loaded.config, kv or loaded.kv, loaded.dtype, loaded.model.device)
        loaded.model.check_cache(self.cache)
        self.reservation = None
        size = spare_bytes(loaded.model, self.cache, max_batch, PREFILL_CHUNK) if memory is None else memory
        if size is not None:
            context = context or loaded.config.max_position_embeddings
            self.reservation = PageReservation(self.cache, size, max_batch, context, PREFILL_CHUNK)
        self.timing, self._clock = Timing(), clock
        self.max_itl = max_itl if loaded.model.chunk_invariant(Batch(self.cache, [])) else None
        self._sizer = ChunkSizer(PREFILL_CHUNK, self.max_itl)
        self._scheduler = Scheduler(self.cache, self.reservation, max_batch, max_queue)
        self._prefill: Prefill | None = None  # of the scheduler's prefilling request
        self._pending: _PendingStep | None = None
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._unheard: list[BaseException] = []  # errors that no request's listener took
        self._generated = 0

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, logprobs: int | None = None,
               echo: bool = False, constraint: TokenConstraint | None = None,
               keep_special: frozenset[int] = frozenset(),
               on_token: Callable[[TokenInfo], None] | None = None,
               on_done: Callable[[Request], None] | None = None,
               on_error: Callable[[BaseException], None] | None = None) -> Request:
        """Queue a request.

        Args:
            prompt: token ids.
            sampling: how the prompt is continued.
            logprobs: how many alternatives' log-probabilities each token comes with, beside its own.
            echo: also score the prompt's own tokens.
            constraint: which tokens the answer may have, and when it is complete; this request's own.
            keep_special: special tokens whose text belongs to the answer's.
            on_token, on_done, on_error: called on the stepping thread; they must return at once. Without
                ``on_error`` an error is raised at the end of :meth:`step`, or printed by the thread.

        Raises:
            UsageError: the prompt is empty, has an unknown id, or doesn't fit (ContextLengthError, or the KV
                cache's memory).
            EngineFull: too many requests wait.
            EngineClosed: the engine is draining or closed.
        """
        check_request(self.loaded, prompt, sampling)
        request = Request(next(self._numbers), self.loaded, prompt, sampling, logprobs, echo, on_token,
                          on_done, on_error, constraint, keep_special)
        if self.reservation is not None:
            self.reservation.check(request.max_length)
        self._scheduler.submit(request)
        return request

    def step(self) -> bool:
        """Run one step; returns ``False`` if there was nothing to do.

        Raises:
            Exception: of a request without ``on_error``, once all other requests have had their step.
        """
        worked = self._step()
        self._raise_unheard()
        return worked

    def stats(self) -> dict[str, int]:
        """What the engine is doing, for people and health checks."""
        return {"running": self._scheduler.running, "waiting": self._scheduler.waiting,
                "max_batch": self._max_batch, "max_queue": self._max_queue,
                "kv_allocated_bytes": self.cache.allocated_bytes, "tokens_generated": self._generated}

    def start(self) -> None:
        """Step on a thread of its own until :meth:`close`."""
        if self._thread is not None:
            raise EngineClosed("this engine was started before", why="it has one thread, once")
        self._thread = threading.Thread(target=self._loop, name="quantkit-engine", daemon=True)
        self._thread.start()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until all have ended.

        Args:
            timeout: seconds; ``None`` waits without limit.

        Returns:
            Whether all have ended.
        """
        self._scheduler.refuse_more()
        return self._scheduler.wait_until_idle(timeout)

    def close(self) -> None:
        """Stop at the end of the current step; requests that haven't ended are cancelled."""
        self._scheduler.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for request in self._scheduler.requests:
            request.cancel()
        self._end_cancelled()
        self._raise_unheard()

    def _loop(self) -> None:
        scheduler = self._scheduler
        if self.loaded.model.device.type == "cuda":
            torch.cuda.set_device(self.loaded.model.device)  # each thread has its own
        while not scheduler.closed:
            try:
                self._step()
            except Exception as error:  # not a request's: the engine itself is broken, so every request ends
                for request in scheduler.requests:
                    request.cancel()
                self._unheard.append(error)
            while self._unheard:
                unheard = self._unheard.pop()
                threading.excepthook(threading.ExceptHookArgs((type(unheard), unheard, unheard.__traceback__,
                                                               threading.current_thread())))
            with scheduler.changed:
                scheduler.changed.notify_all()  # for drain
                scheduler.changed.wait_for(lambda: scheduler.closed or scheduler.busy)

    @torch.inference_mode()
    def _step(self) -> bool:
        self._end_cancelled()
        self._admit()
        scheduler = self._scheduler
        begin, others_decode, launched = self._clock(), bool(scheduler.decoding), self._pending is not None
        reads = self._prefill is not None and not (others_decode and self._sizer.blind)
        prompt_tokens = self._read_prompt() if reads else 0
        decoding = list(scheduler.decoding)
        if decoding:
            # no more rows at once than are independent of each other
            limit = self.loaded.model.decode_rows
            for start in range(0, len(decoding), limit):
                self._decode(decoding[start:start + limit], len(decoding) <= limit)
        self._end([request for request in scheduler.decoding if request.done])
        if others_decode and (prompt_tokens or not reads):
            self._sizer.observe(self._clock() - begin, prompt_tokens, ahead=launched)
        else:
            self._sizer.skip()
        return reads or bool(decoding)

    def _admit(self) -> None:
        """Begin with the next prompt if there is room for it."""
        if (request := self._scheduler.admit()) is not None:
            self._prefill = Prefill(self.loaded, self.cache, request, PREFILL_CHUNK, self._sizer, self._clock)

    def _read_prompt(self) -> int:
        """Go on with the prompt whose turn it is; returns what :meth:`Prefill.step` does."""
        request, prefill, tokens = self._scheduler.prefilling, self._prefill, 0
        if request is None or prefill is None:
            return 0
        begin, before = self._clock(), request.computed_tokens
        try:
            tokens = prefill.step(beside=bool(self._scheduler.decoding))
            if prefill.logits is not None:
                self._scheduler.start_decoding()
                self._prefill = None
                self._sample([request], prefill.logits)
        except Exception as error:  # of one request; the others go on
            self._fail(request, error)
        self.timing.prefill_tokens += request.computed_tokens - before
        self.timing.prefill_s += self._clock() - begin
        return tokens

    def _decode(self, requests: list[Request], all_fit: bool) -> None:
        """Decode one token of each of these requests.

        A GPU that chooses tokens itself is given its next step before the host reads them, because what the
        host does takes as long as a step of a small model. A request that turns out to have ended had a step
        too many.

        Args:
            requests: that decode side by side.
            all_fit: no other request decodes in this step.
        """
        begin = self._clock()
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
        requests = [request for request in requests if not request.done]
        try:
            if failed is not None:
                raise failed
            if requests and self._pending is None:
                last = torch.tensor([[request.result.token_ids[-1]] for request in requests])
                ids = gpu.sent(last, self.loaded.model.device)
                if all_fit and self._can_run_ahead(requests):
                    self._pending = self._launch(requests, ids)
                else:
                    self._sample(requests, self._logits(requests, ids))
                    self.timing.decode_tokens += len(requests)
        except Exception as error:
            for request in requests:
                self._fail(request, error)
        self.timing.decode_s += self._clock() - begin

    def _logits(self, requests: Sequence[Request], ids: torch.Tensor) -> torch.Tensor:
        batch = Batch(self.cache, [request.sequence for request in requests], "decode")
        return self.loaded.model(ids, cache=batch)[:, -1]

    def _can_run_ahead(self, requests: Sequence[Request]) -> bool:
        """Whether the next step can be launched before the host reads this one's tokens."""
        return self.loaded.model.runs_ahead and not any(
            request.wants_logits or request.sampler.on_host for request in requests)

    def _launch(self, requests: list[Request], ids: torch.Tensor) -> _PendingStep:
        """Begin a step of tokens ``ids [n, 1]``, and the choice of the next ones."""
        logits = self._logits(requests, ids)
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
                self._append_token(request, token, None)
                self.timing.decode_tokens += 1

    def _sample(self, requests: list[Request], logits: torch.Tensor) -> None:
        """Choose and append the next token of each request, from ``logits [n, vocab]``."""
        tokens = sample_tokens(logits, [request.sampler for request in requests],
                               [request.history if request.sampler.on_host else [] for request in requests])
        for request, token, row in zip(requests, tokens, logits, strict=True):
            self._append_token(request, token, row)

    def _append_token(self, request: Request, token: int | QuantkitError, logits: torch.Tensor
                      | None) -> None:
        """Give a request its token, or the reason why there is none."""
        try:
            if isinstance(token, QuantkitError):
                raise self.cache.codec_fault(request.sequence) or token
            request.append(token, logits)
            self._generated += 1
        except Exception as error:
            self._fail(request, error)

    def _end_cancelled(self) -> None:
        """End requests that were cancelled."""
        cancelled = self._scheduler.cancelled()
        for request in cancelled:
            try:
                request.finish("cancelled")
            except Exception as error:  # its listener's
                self._unheard.append(error)
        # a listener is told before drain() can see that its request is gone
        self._end([*cancelled, *(request for request in self._scheduler.decoding
                                 if request.done and request not in cancelled)])

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request because of an error and tell its listener."""
        self._end([request])
        try:
            request.fail(error)
        except Exception as unheard:  # nobody listens, or the listener fails
            self._unheard.append(unheard)

    def _end(self, requests: Sequence[Request]) -> None:
        """Give back what requests hold."""
        if requests:
            if self._prefill is not None and self._scheduler.prefilling in requests:
                self._prefill.close()
                self._prefill = None
            self._scheduler.end(requests)
        if not self._scheduler.decoding:
            self._pending = None

    def _raise_unheard(self) -> None:
        if self._unheard:
            error, self._unheard = self._unheard[0], []
            raise error


__all__ = ["PREFILL_CHUNK", "Engine", "EngineClosed", "EngineFull"]
