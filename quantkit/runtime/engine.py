"""Continuous batching: requests join and leave at any step, over one model and its KV caches."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType

import torch

from quantkit.kv.spec import KVSpec
from quantkit.runtime.core import (
    EngineClosed,
    EngineDeadError,
    Pooling,
    Request,
    RequestLabel,
    StepOutput,
    StepPlan,
    TokenInfo,
    TokenResult,
    check_request,
)
from quantkit.runtime.denoising import Denoiser, Denoising, check_block_request, check_blocks
from quantkit.runtime.drafting.base import Drafter
from quantkit.runtime.kv_manager import KVCacheManager
from quantkit.runtime.kv_settings import KVSettings
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.memory.kv import NO_DRAFTS
from quantkit.runtime.memory.scratch import GPU_LEAST, PREFILL_CHUNK, prompt_portion
from quantkit.runtime.runner import ModelRunner, PipelinedDecoder
from quantkit.runtime.sampler import Sampling
from quantkit.runtime.scheduler import LEAST, ChunkSizer, Scheduler
from quantkit.runtime.speculation import DraftCounts, Speculator
from quantkit.runtime.trace import Timing, Trace
from quantkit.structure.base import TokenConstraint
from quantkit.support.errors import UsageError

RETRIES = 3
"""Steps with others that may fail until a request that was in all of them fails too."""


class FairLock:
    """Held by an engine during a step. Whoever lets go of it gets it back after somebody who waits; a plain
    lock could go to the same thread again and again, because that one is awake and can take it before
    another wakes up.

    It also says whose requests decode, so that an engine can keep its prompts' chunks small beside them.
    """

    def __init__(self) -> None:
        self._running, self._next = threading.Lock(), threading.Lock()
        self._decoding: set[object] = set()

    def __enter__(self) -> None:
        with self._next:  # one of those who wait holds this one, so that who lets go can't overtake it
            self._running.acquire()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._running.release()

    def decodes(self, engine: object, whether: bool) -> None:
        """Note at the end of a step whether requests of an engine will decode in its next one."""
        if whether:
            self._decoding.add(engine)
        else:
            self._decoding.discard(engine)

    def is_decoding_elsewhere(self, engine: object) -> bool:
        """Whether requests of another engine wait for their next token meanwhile."""
        return bool(self._decoding - {engine})


class Engine:
    """Runs requests over one model.

    Each step decodes one token of every request behind its prompt and takes chunks of prompts through the
    model; :class:`~quantkit.runtime.scheduler.Scheduler` says which, and
    :class:`~quantkit.runtime.runner.ModelRunner` runs them together where rows don't depend on each other. A
    request's tokens don't depend on other requests.

    The caller either calls :meth:`step` itself, or :meth:`start`\\ s a thread that does. The model belongs to
    that thread. :meth:`submit` and ``Request.cancel`` may be called from any.

    Args:
        kv: how keys and values are kept; by default as the model's checkpoint says.
        more_kv: further settings that requests may choose where the memory is fixed, which is divided evenly.
            Where it isn't, they may choose any.
        max_batch: requests that run side by side.
        max_queue: requests that may wait.
        memory: bytes that the KV cache may take. All pages are taken at once; a request waits until there
            are enough for its prompt, and where they run out the last one gives up its own and is computed
            again later. By default the cache grows and shrinks; on a GPU it takes what memory is left.
        context: tokens of the longest request, by default the model's context. The cache never takes more
            than all requests of this length need, and states that others begin with.
        max_itl: seconds between two tokens of a request while another's prompt is read (inter-token latency);
            :class:`~quantkit.runtime.scheduler.ChunkSizer` sizes the prompt's chunks for that. By default,
            chunks have as many tokens as go through the model at once, and with a model whose results depend
            on how a prompt is cut always :data:`PREFILL_CHUNK`.
        prefix_cache: bytes of keys and values that are kept for texts which begin like earlier ones; 0: none.
            ``None``: a part of the machine's memory, or the pages that nobody needs where the size is fixed.
        drafter: guesses tokens, of which one step confirms several; what is generated doesn't depend on it.
            Not where a token may have other bits beside others of its text than alone
            (:attr:`KVCacheManager.drafts`).
        denoising: how a model that writes blocks writes them.
        lock: held during a step, so that several engines share a device.
        clock: returns the time in seconds.

    Attributes:
        cache: the KV cache of the default setting.
        reservation: shares out its pages among requests, if its size is fixed.
        max_itl: the argument; ``None`` with a model whose results depend on how a prompt is cut.
        timing: the time of all steps so far.
        trace: records what requests and steps did.
        speculator: asks for drafts; ``None``: nobody drafts.
        denoiser: writes blocks; ``None``: the model writes a token after the other.
        thread: the thread that steps from :meth:`start` to :meth:`close`.
        failure: the error that has ended that thread, if one has.
    """

    def __init__(self, loaded: LoadedModel, *, kv: KVSpec | None = None, more_kv: Sequence[KVSpec] = (),
                 max_batch: int = 8, max_queue: int = 64, memory: int | None = None,
                 context: int | None = None, max_itl: float | None = None, prefix_cache: int | None = 0,
                 drafter: Drafter | None = None, denoising: Denoising | None = None,
                 lock: FairLock | None = None,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        for name, value in (("max_batch", max_batch), ("max_queue", max_queue)):
            if value < 1:
                raise UsageError(f"{name} is {value}", why="it must be at least 1")
        check_blocks(loaded, drafter, denoising)
        self.loaded = loaded
        self._max_batch = max_batch
        self._max_queue = max_queue
        self._context = context or loaded.config.max_position_embeddings
        self.speculator = None
        if drafter is not None and loaded.model.runs_ahead:
            # before the KV cache, which takes what memory is left on a GPU
            self.speculator = Speculator(drafter, loaded, clock)
        self._settings = KVSettings(loaded, kv or loaded.kv, more_kv, memory=memory, sequences=max_batch,
                                    context=self._context,
                                    chunk=PREFILL_CHUNK, prefix_bytes=prefix_cache,
                                    drafts=NO_DRAFTS if self.speculator is None else self.speculator.memory)
        default = self._settings.default
        self.cache, self.reservation = default.cache, default.reservation
        self._clock = clock
        self.timing = Timing()
        self.trace = Trace(clock)
        self.max_itl = max_itl if default.invariant else None
        self._portion = prompt_portion(loaded.model, self.cache, PREFILL_CHUNK)
        least = GPU_LEAST if loaded.model.device.type == "cuda" else LEAST
        self._sizer = ChunkSizer(self._portion, self.max_itl, least)
        self._scheduler = Scheduler(max_batch, max_queue, self._portion, self.trace)
        diffusion = loaded.config.diffusion
        self.denoiser = None if diffusion is None else Denoiser(diffusion, denoising or Denoising())
        if drafter is None or not default.drafts:
            self.speculator = None
        elif self.speculator is None:
            self.speculator = Speculator(drafter, loaded, clock)
        elif self.reservation is not None:
            self.speculator.preallocate(self.cache.allocated_bytes // self.cache.bytes_per_token)
        self._runner = ModelRunner(loaded, PREFILL_CHUNK, self._sizer, clock, self.speculator,
                                   None if self.denoiser is None else self.denoiser.rows)
        self._decoder = PipelinedDecoder(loaded.model, self._runner, self.timing)
        self._lock = lock or FairLock()
        self._numbers = itertools.count()
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self._unheard: list[BaseException] = []  # errors that no request's listener took
        self._generated = self._prompt_tokens = self._steps = 0

    def prepare(self, kv: KVSpec) -> KVCacheManager:
        """Make ready what requests with this KV setting need, so that no step waits for it. May be called
        from any thread.

        Returns:
            What :meth:`submit` takes instead of the setting, and then makes nothing itself.

        Raises:
            UsageError: the setting doesn't fit the model, or the engine has no memory for it.
            EngineFull: too many other settings are in use.
        """
        return self._settings.prepare(kv)

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, logprobs: int | None = None,
               echo: bool = False, constraint: TokenConstraint | None = None,
               keep_special: frozenset[int] = frozenset(), kv: KVSpec | KVCacheManager | None = None,
               priority: int = 0, pooling: Pooling | None = None, label: RequestLabel | None = None,
               cache_salt: bytes = b"", on_token: Callable[[TokenInfo], None] | None = None,
               on_done: Callable[[Request], None] | None = None,
               on_error: Callable[[BaseException], None] | None = None) -> Request:
        """Queue a request.

        Args:
            logprobs: the number of alternatives whose log-probabilities come with each token and its own.
            echo: also score the prompt's own tokens.
            constraint: says which tokens may follow, and when the answer is complete; this request's own.
            keep_special: special tokens whose text belongs to the answer's.
            kv: how its keys and values are kept, if not in the engine's default way; what :meth:`prepare`
                returned, if this must not take long.
            priority: requests with a lower one go first, and give up their pages last.
            pooling: compute the prompt's embedding, and no token.
            label: names it in the trace; by default its number does.
            cache_salt: only requests with the same salt share prefixes; see
                :func:`~quantkit.kv.prefix.block_names`.
            on_token: called with each token on the stepping thread; it must return at once, as must the next
                two.
            on_done: called when the request has ended, in whichever way.
            on_error: called with what failed; without it the error is raised at the end of :meth:`step`, or
                printed by the thread.

        Raises:
            UsageError: the prompt is empty, has an unknown id, or doesn't fit (ContextLengthError, or the KV
                cache's memory); the KV setting isn't there.
            EngineFull: too many requests wait, or use other KV settings.
            EngineClosed: the engine is draining or closed.
            EngineDeadError: an error has ended the engine's thread.
        """
        check_request(self.loaded, prompt, sampling)
        if (diffusion := self.loaded.config.diffusion) is not None:
            check_block_request(diffusion, prompt, scores=logprobs is not None or echo,
                                pools=pooling is not None, constrained=constraint is not None)
        request = Request(next(self._numbers), self.loaded, prompt, sampling, logprobs, echo, pooling,
                          priority, on_token, on_done, on_error, constraint, keep_special, label, cache_salt)
        text = request.kv
        self._settings.use(text, kv)
        try:
            text.manager.check(text.max_length)
            self._scheduler.submit(request)
        except BaseException as error:
            text.manager.texts.discard(text)
            if isinstance(error, EngineClosed):
                self.check_alive()
            raise
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
        """What the engine is doing, for people and health checks. Bytes and tokens; ``prefix_queries`` and
        ``prefix_hits`` are prompt tokens that were looked up and found in the prefix cache, and
        ``prefix_cache_bytes`` are those of ``kv_used_bytes`` that no running request needs. A page has 64
        slots of one KV head in one layer; shared ones have several holders."""
        managers = self._settings.managers
        pools = [pool for kv in managers for pool in kv.cache.pools]
        counts = DraftCounts() if self.speculator is None else self.speculator.counts
        return {"running": self._scheduler.running, "waiting": self._scheduler.waiting,
                "max_batch": self._max_batch, "max_queue": self._max_queue,
                "kv_allocated_bytes": sum(kv.cache.allocated_bytes for kv in managers),
                "kv_used_bytes": sum(kv.cache.used_bytes for kv in managers),
                "tokens_generated": self._generated, "prompt_tokens": self._prompt_tokens,
                "steps": self._steps, "preemptions": self._scheduler.preemptions,
                "prefix_queries": self._settings.prefix_queries, "prefix_hits": self._settings.prefix_hits,
                "prefix_cache_bytes": sum(kv.held_prefix_bytes for kv in managers),
                "kv_pages_used": sum(pool.used for pool in pools),
                "kv_pages_shared": sum(pool.shared_pages for pool in pools),
                "kv_pages_total": sum(pool.total for pool in pools),
                "drafted": counts.tokens, "accepted": counts.accepted,
                "block_size": 1 if self.denoiser is None else self.denoiser.rows}

    def start(self, on_dead: Callable[[EngineDeadError], None] | None = None) -> None:
        """Step on a thread of its own until :meth:`close`.

        Args:
            on_dead: called once if an error ends the thread. By default the error is printed.
        """
        if self.thread is not None:
            raise EngineClosed("this engine was started before", why="it has one thread, once")
        self.thread = threading.Thread(target=self._run, args=(on_dead,), name="quantkit-engine",
                                       daemon=True)
        self.thread.start()

    def check_alive(self) -> None:
        """Raises EngineDeadError: an error has ended the engine's thread."""
        if self.failure is not None:
            raise EngineDeadError(self.failure)  # its own for everybody, as whoever raises it writes to it

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
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()
        for request in self._scheduler.requests:
            request.cancel()
        self._end_cancelled()
        self._settings.clear()
        self._raise_unheard()

    def _run(self, on_dead: Callable[[EngineDeadError], None] | None) -> None:
        """Step until the engine is closed. If an error ends that, every request ends with it."""
        try:
            self._loop()
        except BaseException as error:
            self.failure = error
            self._scheduler.close()  # who comes from now on is told at once
            dead = EngineDeadError(error)
            dead.__cause__ = error
            for request in self._scheduler.requests:
                with contextlib.suppress(BaseException):  # what it holds can't be given back
                    self._fail(request, dead)
            (on_dead or _print_error)(dead)
        finally:
            with contextlib.suppress(Exception):
                self._lock.decodes(self, False)

    def _loop(self) -> None:
        scheduler = self._scheduler
        if self.loaded.model.device.type == "cuda":
            torch.cuda.set_device(self.loaded.model.device)  # each thread has its own
        tokens = self._context if self.reservation is None else self.reservation.tokens
        with self._lock, torch.inference_mode():
            rows, layers = (1, ()) if self.speculator is None else (self.speculator.rows,
                                                                    self.speculator.layers)
            for _ in self.loaded.model.warm_up(self.cache, self._max_batch, tokens, rows, layers):
                if scheduler.closed:
                    break
        while not scheduler.closed:
            try:
                with self._lock:
                    self._step()
            except Exception as error:  # not a request's: the engine itself is broken, so every request ends
                self._unheard.append(error)
                for request in scheduler.requests:
                    try:
                        self._fail(request, error)
                    except Exception as more:  # what it holds can't be given back either
                        self._unheard.append(more)
            self._lock.decodes(self, bool(scheduler.decoding))
            while self._unheard:
                _print_error(self._unheard.pop())
            with scheduler.changed:
                scheduler.changed.notify_all()  # for drain
                scheduler.changed.wait_for(lambda: scheduler.closed or scheduler.busy)

    @torch.inference_mode()
    def _step(self) -> bool:
        self._end_cancelled()
        scheduler = self._scheduler
        if scheduler.may_preempt:
            # tokens that were drawn belong to their requests, whatever becomes of their pages
            self._give(self._decoder.flush())
            self._end([request for request in scheduler.decoding if request.done])
            scheduler.preempt_for_pages()
        while (failure := scheduler.admit()) is not None:
            self._fail(*failure)
        for request in [request for request in scheduler.prefilling
                        if not request.kv.prompt_end and not request.kv.length]:
            scheduler.start_decoding(request)  # it is less than a block, and read with the first one
        begin, launched = self._clock(), self._decoder.pending
        decoding = bool(scheduler.decoding)
        awaited = decoding or self._lock.is_decoding_elsewhere(self)  # somebody waits for a token meanwhile
        self._sizer.begin(len(scheduler.decoding))
        step = scheduler.plan(self._prompt_budget(decoding, awaited))
        if not (step.decode or step.chunks or step.deferred):
            return False
        self._steps += 1
        self.trace.begin_step(begin, step)
        speculator = None if scheduler.prefilling else self.speculator
        drafts = {} if speculator is None else self._drafts(speculator, step)
        drafted, ahead = self._clock(), self._decoder.pending
        mixed = [request for request in step.decode if not (request.done or request.cancelled) and (
            request.kv.manager.supports_mixed_batches or (drafts and request.kv.manager.drafts))]
        together = set(map(id, mixed))
        if self.denoiser is not None:
            drafts = self.denoiser.propose(mixed)
        # before: weights that are gone would end the process; after: what was changed gives no token
        self.loaded.check_files()
        output = self._runner.run(step, mixed, awaited, drafts)
        self.loaded.check_files()
        count = self._generated
        self._finish(output)
        if speculator is not None and mixed and not output.failed:
            # a device that runs ahead is done when its tokens were read
            done = self._clock() if self.loaded.model.runs_ahead else output.computed_at
            speculator.times.observe(len(mixed) + sum(map(len, drafts.values())), done - drafted)
        decoded = self._generated - count if drafts else len(mixed)
        self._prompt_tokens += output.prompt_tokens
        rows = decoded if self.denoiser is None else sum(map(len, drafts.values()))
        self.timing.add(bool(step.chunks or step.deferred), output.prompt_tokens, decoded,
                        self._clock() - begin, rows)
        apart: dict[object, list[Request]] = {}
        for request in step.decode:
            if id(request) not in together and not request.done:
                apart.setdefault(request.kv.manager, []).append(request)
        for requests in apart.values():
            # no more rows at once than are independent of each other
            limit = self.loaded.model.decode_rows
            for start in range(0, len(requests), limit):
                before = self._clock()
                self._give(self._decoder.decode(requests[start:start + limit],
                                                len(apart) == 1 and len(requests) <= limit))
                self.timing.decode_s += self._clock() - before
        if speculator is not None and ahead and self._decoder.pending:
            speculator.times.observe(len(step.decode), self._clock() - begin)
        self.trace.end_step(step, output)
        self._end([request for request in (*scheduler.decoding, *scheduler.prefilling) if request.done])
        # its time says what steps take; all steps of blocks are alike
        usual = not (output.acted or (drafts and self.denoiser is None))
        if awaited and usual and (output.prompt_tokens or not (step.chunks or step.deferred)):
            self._sizer.observe(self._clock() - begin, output.prompt_tokens, ahead=launched)
        else:
            self._sizer.skip()
        return True

    def _drafts(self, speculator: Speculator, step: StepPlan) -> dict[int, list[int]]:
        """Drafts of requests that decode in this step, by their ids."""
        requests = [request for request in step.decode if request.kv.manager.drafts]
        if not requests:
            return {}
        if self._decoder.pending:
            if not speculator.due(requests):
                return {}
            self._give(self._decoder.flush())  # a draft goes on from these tokens
        return speculator.propose([request for request in requests
                                   if not (request.done or request.cancelled)])

    def _prompt_budget(self, decoding: bool, awaited: bool) -> int:
        if not awaited:
            return self._portion
        return 0 if decoding and self._sizer.blind else self._sizer.tokens_in(self._sizer.spare)

    def _finish(self, output: StepOutput) -> None:
        """Give requests what came of a step."""
        for request, end in output.advanced:
            try:
                request.kv.manager.advance(request.kv, end, request.schedule.is_awaited)
            except Exception as failure:  # there is no memory for what is kept
                output.failed.append((request, failure))
        for request in output.ended:
            try:
                request.kv.manager.prompt_ended(request.kv)
            except Exception as failure:
                output.failed.append((request, failure))
        for request, error in output.failed:
            self._fail(request, error)
        for request, error in output.lost:
            request.fault.isolated = True
            request.fault.retries += 1
            if request.fault.retries > RETRIES:
                self._fail(request, error)
            else:
                self._scheduler.preempt(request, keep=False)
        prompts = {id(request) for request in self._scheduler.prefilling}
        for request in (*(request for request, _ in output.advanced), *output.ended):
            if (id(request) in prompts and request.prefill.deferred is None
                    and request.kv.computed_tokens >= request.kv.length):
                prompts.discard(id(request))
                request.fault.isolated = False
                self._scheduler.start_decoding(request)
                if request.prefill.pooler is not None:
                    request.result.embedding = request.prefill.pooler.result()
                    self._heard(functools.partial(request.finish, "stop"))
        for part in output.logits:
            if part.batch is None:
                self._give(part.sample())
            else:
                verifier = self.denoiser or self.speculator
                assert verifier is not None
                self._give(verifier.verify(part))

    def _give(self, results: Iterable[TokenResult]) -> None:
        """Give requests their tokens, or the reasons why there are none, one by one as they come."""
        for result in results:
            self.loaded.check_files()
            request, error = result.request, result.error
            if error is None:
                try:
                    request.append(result.token, result.logits, result.scores)
                    self._generated += 1
                except Exception as failure:
                    error = failure
            if error is None:
                continue
            if request.done and result.error is not None:  # it has all its tokens, and its policy failed
                self._end([request], keep=False)
            else:
                self._fail(request, error)

    def _end_cancelled(self) -> None:
        cancelled = self._scheduler.cancelled()
        for request in cancelled:
            self._heard(functools.partial(request.finish, "cancelled"))
        # a listener is told before drain() can see that its request is gone
        self._end([*cancelled, *(request for request in self._scheduler.decoding
                                 if request.done and request not in cancelled)])

    def _heard(self, tell: Callable[[], None]) -> None:
        try:
            tell()
        except Exception as error:  # its listener's
            self._unheard.append(error)

    def _fail(self, request: Request, error: Exception) -> None:
        """End a request because of an error and tell its listener."""
        try:
            self._end([request], keep=False)
        finally:  # even if what it holds can't be given back
            self._heard(functools.partial(request.fail, error))  # nobody listens, or the listener fails

    def _end(self, requests: Sequence[Request], *, keep: bool = True) -> None:
        """Give back what requests hold. ``keep``: others may begin with what was computed of them."""
        if requests:
            if self.speculator is not None:
                self.speculator.end(requests)
            if self.denoiser is not None:
                self.denoiser.end(requests)
            self._scheduler.end(requests, keep=keep)
        if not self._scheduler.decoding:
            self._decoder.forget()

    def _raise_unheard(self) -> None:
        if self._unheard:
            error, self._unheard = self._unheard[0], []
            raise error


def _print_error(error: BaseException) -> None:
    """Print an error as one that ends a thread."""
    threading.excepthook(threading.ExceptHookArgs((type(error), error, error.__traceback__,
                                                   threading.current_thread())))
