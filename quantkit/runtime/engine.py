"""Continuous batching: requests join and leave at any step, over one model and one KV cache."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quantkit.errors import QuantkitError, UsageError
from quantkit.kv.cache import KVCache
from quantkit.kv.reservation import PageReservation
from quantkit.ops import gpu
from quantkit.runtime.chunk_size import ChunkSizer
from quantkit.runtime.gpu.memory import spare_bytes
from quantkit.runtime.gpu.model import GpuModel
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.prompt import Prefill
from quantkit.runtime.request import Request, TokenInfo, check_request
from quantkit.runtime.sampler import PendingTokens, Sampling, sample_async, sample_tokens
from quantkit.runtime.timing import Timing
from quantkit.spec import KVSpec

PREFILL_CHUNK = 512
"""Prompt tokens that go through the model at once, at most; others decode between two chunks."""


class EngineFull(QuantkitError):
    """The queue is full."""


class EngineClosed(QuantkitError):
    """The engine takes no more requests."""


@dataclass(frozen=True)
class _Flight:
    """A step whose tokens nobody has looked at."""

    rows: list[Request]
    drawn: PendingTokens


class Engine:
    """Runs requests over one model.

    Each step takes one chunk of one waiting prompt through the model, then decodes one token of every
    running sequence. A request's tokens don't depend on what runs beside it: prompts go alone, and
    decoding gives each row the bits that it gets alone.

    The caller either calls :meth:`step` itself, or :meth:`start`\\ s a thread that does; the model
    belongs to that thread. :meth:`submit` and ``Request.cancel`` may be called from any.

    Args:
        loaded: the model.
        kv: how keys and values are kept; by default as the model's checkpoint says.
        max_batch: sequences that decode side by side.
        max_queue: requests that may wait.
        memory: bytes that the KV cache may take; all pages are taken at once, and a request waits until there
            is room for it. By default the cache grows and shrinks, and on a GPU takes what is left there.
        context: tokens of the longest request, by default what the model was made for: more than all
            sequences of so many tokens need is not taken.
        max_itl: seconds between two tokens of a sequence while another's prompt is read:
            :class:`~quantkit.runtime.chunk_size.ChunkSizer` sizes its chunks to that. By default, and with a
            model whose results depend on the cut, they have :data:`PREFILL_CHUNK` tokens.
        clock: tells seconds.

    Attributes:
        cache: the KV cache.
        room: who has how much of it, if its size is fixed.
        max_itl: as given, or ``None`` with a model whose results depend on the cut.
        timing: so far.
    """

    def __init__(self, loaded: LoadedModel, *, kv: KVSpec | None = None, max_batch: int = 8,
                 max_queue: int = 64, memory: int | None = None, context: int | None = None,
                 max_itl: float | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        for name, value in (("max_batch", max_batch), ("max_queue", max_queue)):
            if value < 1:
                raise UsageError(f"{name} is {value}", why="it must be at least 1")
        self.loaded, self._max_batch, self._max_queue = loaded, max_batch, max_queue
        self.cache = KVCache(loaded.config, kv or loaded.kv, loaded.dtype, loaded.model.device)
        self.room = None
        if isinstance(loaded.model, GpuModel):
            loaded.model.check(self.cache)
        size = spare_bytes(loaded.model, self.cache, max_batch, PREFILL_CHUNK) if memory is None else memory
        if size is not None:
            self.room = PageReservation(self.cache, size, max_batch, context
                                        or loaded.config.max_position_embeddings,
                                        PREFILL_CHUNK)
        self.timing, self._clock = Timing(), clock
        self.max_itl = max_itl if loaded.model.chunk_invariant(self.cache.batch([])) else None
        self._sizer = ChunkSizer(PREFILL_CHUNK, self.max_itl)
        self._waiting: deque[Request] = deque()
        self._prefilling: Request | None = None
        self._prefill: Prefill | None = None  # of that
        self._running: list[Request] = []
        self._flight: _Flight | None = None
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._refusing = self._closed = False
        self._thread: threading.Thread | None = None
        self._unheard: list[BaseException] = []
        self._generated = 0

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, logprobs: int | None = None,
               echo: bool = False, on_token: Callable[[TokenInfo], None] | None = None,
               on_done: Callable[[Request], None] | None = None,
               on_error: Callable[[BaseException], None] | None = None) -> Request:
        """Queue a request.

        Args:
            prompt: token ids.
            sampling: how it is continued.
            logprobs: log-probabilities of so many most likely tokens beside the chosen one's.
            echo: also score the prompt's own tokens.
            on_token, on_done, on_error: called on the stepping thread; they must return at once. Without
                ``on_error`` an error is raised at the end of :meth:`step`, or printed by the thread.

        Raises:
            UsageError: the prompt is empty, has an unknown id, or doesn't fit (ContextLengthError, or the KV
                cache's memory).
            EngineFull: too many wait.
            EngineClosed: it is draining or closed.
        """
        check_request(self.loaded, prompt, sampling)
        if self.room is not None:
            self.room.check(len(prompt) + sampling.max_tokens)
        with self._changed:
            if self._refusing:
                raise EngineClosed("no more requests are taken", why="it is about to end")
            if len(self._waiting) >= self._max_queue:
                raise EngineFull(f"{len(self._waiting)} requests wait already", why="the queue is full",
                                 next="try again in a moment, or start with a larger --max-queue")
            ticket = Request(next(self._numbers), self.loaded, prompt, sampling, logprobs, echo, on_token,
                             on_done, on_error)
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def step(self) -> bool:
        """One iteration; ``False`` if there was nothing to do.

        Raises:
            Exception: of a request without ``on_error``, once the others have had their step.
        """
        worked = self._step()
        self._raise()
        return worked

    @torch.inference_mode()
    def _step(self) -> bool:
        self._sweep()
        begin, beside, ahead = self._clock(), bool(self._running), self._flight is not None
        reads = self._prefill is not None and not (beside and self._sizer.blind)
        fed = self._read() if reads else 0
        running = list(self._running)
        if running:
            # no more rows at once than what is independent of its neighbours
            most = self.loaded.model.decode_rows
            for start in range(0, len(running), most):
                self._decode(running[start:start + most], len(running) <= most)
        self._retire()
        if beside and (fed or not reads):
            self._sizer.observe(self._clock() - begin, fed, ahead=ahead)
        else:
            self._sizer.skip()
        return reads or bool(running)

    def stats(self) -> dict[str, int]:
        """What it is doing, for people and health checks."""
        return {"running": len(self._running) + (self._prefilling is not None),
                "waiting": len(self._waiting), "max_batch": self._max_batch, "max_queue": self._max_queue,
                "kv_allocated_bytes": self.cache.allocated_bytes,
                "tokens_generated": self._generated}

    def start(self) -> None:
        """Step on a thread of its own until :meth:`close`."""
        if self._thread is not None:
            raise EngineClosed("this engine was started before", why="it has one thread, once")
        self._thread = threading.Thread(target=self._loop, name="quantkit-engine", daemon=True)
        self._thread.start()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait until those that are there are done.

        Args:
            timeout: seconds; ``None`` waits for ever.

        Returns:
            Whether all are done.
        """
        with self._changed:
            self._refusing = True
            return self._changed.wait_for(lambda: self._closed or not self._busy(), timeout)

    def close(self) -> None:
        """Stop at the end of the current step; what still runs is cancelled."""
        with self._changed:
            self._refusing = self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        left = [*self._waiting, *([self._prefilling] if self._prefilling else []), *self._running]
        for ticket in left:
            ticket.cancel()
        self._sweep()
        self._raise()

    def _busy(self) -> bool:
        return bool(self._waiting or self._prefilling or self._running)

    def _loop(self) -> None:
        if self.loaded.model.device.type == "cuda":
            torch.cuda.set_device(self.loaded.model.device)  # a thread's own
        while not self._closed:
            try:
                self._step()
            except Exception as error:  # not a request's: the engine itself is broken, and says so to all
                for ticket in [*self._waiting, *([self._prefilling] if self._prefilling else []),
                               *self._running]:
                    ticket.cancel()
                self._unheard.append(error)
            while self._unheard:
                one = self._unheard.pop()
                threading.excepthook(threading.ExceptHookArgs((type(one), one, one.__traceback__,
                                                               threading.current_thread())))
            with self._changed:
                self._changed.notify_all()  # for drain
                self._changed.wait_for(lambda: self._closed or self._busy())

    def _sweep(self) -> None:
        """End what was cancelled; take the next prompt if there is room."""
        with self._changed:
            gone = waiting = [ticket for ticket in self._waiting if ticket.cancelled]
        if self._prefilling is not None and self._prefilling.cancelled:
            gone = [*gone, self._prefilling]
        for ticket in [*gone, *(ticket for ticket in self._running if ticket.cancelled)]:
            try:
                ticket.finish("cancelled")
            except Exception as error:  # its listener's
                self._unheard.append(error)
        # it is told before drain() can see that it is gone
        if self._prefilling in gone:
            self._free(gone[-1:])
        self._retire()
        with self._changed:
            for ticket in waiting:  # those that were seen: another may be cancelled this very moment
                self._waiting.remove(ticket)
            if self._waiting and self._prefilling is None and len(self._running) < self._max_batch:
                first = self._waiting[0]  # should it fail, the request still waits
                size = len(first.prompt) + first.sampling.max_tokens
                if self.room is not None and not self.room.fits(size):
                    return
                first.row = self.cache.add(size)
                if self.room is not None:
                    self.room.promise(first.row, size)
                self._prefilling = self._waiting.popleft()
                self._prefill = Prefill(self.loaded, self.cache, first, PREFILL_CHUNK, self._sizer,
                                        self._clock)

    def _read(self) -> int:
        """Go on with the prompt whose turn it is; returns what :meth:`Prefill.step` does."""
        ticket, prefill, fed = self._prefilling, self._prefill, 0
        if ticket is None or prefill is None:
            return 0
        begin, before = self._clock(), ticket.fed
        try:
            fed = prefill.step(beside=bool(self._running))
            if prefill.logits is not None:
                if self.room is not None:
                    self.room.settle(ticket.row)
                self._running.append(ticket)
                self._prefilling = self._prefill = None
                self._push([ticket], prefill.logits)
        except Exception as error:  # of one request; the others go on
            self._fail(ticket, error)
        self.timing.prefill_tokens += ticket.fed - before
        self.timing.prefill_s += self._clock() - begin
        return fed

    def _decode(self, rows: list[Request], alone: bool) -> None:
        """One token of each of these sequences.

        A GPU that chooses tokens itself is given its next step before they are looked at: what the host does
        takes as long as a step of a small model. A sequence that turns out to have ended had a step too many.

        Args:
            rows: the sequences.
            alone: there are no others.
        """
        begin = self._clock()
        flight, self._flight = self._flight, None
        failed = None
        if flight is not None and alone and flight.rows == rows and not any(one.last for one in rows):
            try:
                self._flight = self._launched(rows, flight.drawn.ids[:, None])
            except Exception as error:  # the tokens before are good
                failed = error
        if flight is not None:
            self._arrive(flight)
        rows = [ticket for ticket in rows if not ticket.done]
        try:
            if failed is not None:
                raise failed
            if rows and self._flight is None:
                device = self.loaded.model.device
                ids = gpu.sent(torch.tensor([[ticket.result.token_ids[-1]] for ticket in rows]), device)
                if alone and self._flies(rows):
                    self._flight = self._launched(rows, ids)
                else:
                    self._push(rows, self._logits(rows, ids))
                    self.timing.decode_tokens += len(rows)
        except Exception as error:
            for ticket in rows:
                self._fail(ticket, error)
        self.timing.decode_s += self._clock() - begin

    def _logits(self, rows: Sequence[Request], ids: torch.Tensor) -> torch.Tensor:
        batch = self.cache.batch([ticket.row for ticket in rows], "decode")
        return self.loaded.model(ids, cache=batch)[:, -1]

    def _flies(self, rows: Sequence[Request]) -> bool:
        """Whether the host needn't see a step's result before the next."""
        model = self.loaded.model
        return isinstance(model, GpuModel) and not any(ticket.wants_logits or ticket.sampler.on_host
                                                       for ticket in rows)

    def _launched(self, rows: list[Request], ids: torch.Tensor) -> _Flight:
        """A step of tokens ``ids [n, 1]``, and the choice of the next."""
        return _Flight(rows, sample_async(self._logits(rows, ids), [ticket.sampler for ticket in rows]))

    def _arrive(self, flight: _Flight) -> None:
        """Tokens of those that wait for one."""
        try:
            tokens = flight.drawn.tokens()
        except Exception as error:  # of the step: a GPU says so when it is waited for
            self._flight = None
            for ticket in flight.rows:
                if not ticket.done:
                    self._fail(ticket, error)
            return
        for ticket, token in zip(flight.rows, tokens):
            if not ticket.done:
                self._give(ticket, token, None)
                self.timing.decode_tokens += 1

    def _push(self, tickets: list[Request], logits: torch.Tensor) -> None:
        """The next token of each, from ``logits [n, vocab]``."""
        chosen = sample_tokens(logits, [ticket.sampler for ticket in tickets],
                               [ticket.history if ticket.sampler.on_host else [] for ticket in tickets])
        for ticket, token, row in zip(tickets, chosen, logits, strict=True):
            self._give(ticket, token, row)

    def _give(self, ticket: Request, token: int | QuantkitError, row: torch.Tensor | None) -> None:
        """A token, or why there is none."""
        try:
            if isinstance(token, QuantkitError):
                raise token
            ticket.push(token, row)
            self._generated += 1
        except Exception as error:
            self._fail(ticket, error)

    def _fail(self, ticket: Request, error: Exception) -> None:
        """Forget a sequence, give back its pages and tell its listener."""
        if ticket in self._running:
            self._running.remove(ticket)
        self._free([ticket])
        try:
            ticket.fail(error)
        except Exception as unheard:  # nobody listens, or the listener fails
            self._unheard.append(unheard)

    def _free(self, tickets: Sequence[Request]) -> None:
        """Their memory is others' now."""
        if self._prefill is not None and self._prefilling in tickets:
            self._prefill.close()
            self._prefilling = self._prefill = None
        self.cache.free([ticket.row for ticket in tickets])
        if self.room is not None:
            for ticket in tickets:
                self.room.release(ticket.row)

    def _raise(self) -> None:
        if self._unheard:
            error, self._unheard = self._unheard[0], []
            raise error

    def _retire(self) -> None:
        done = [ticket for ticket in self._running if ticket.done]
        if done:
            self._free(done)
            self._running = [ticket for ticket in self._running if not ticket.done]
        if not self._running:
            self._flight = None
