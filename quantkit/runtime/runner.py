"""Takes a step's tokens through the model: prompts' chunks and decoding sequences, together where it can.

Where they go apart, :class:`PipelinedDecoder` decodes, one step ahead of the host where the model can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from quantkit.kv.base import Phase
from quantkit.kv.batch import Batch
from quantkit.kv.reread import finish_prompt
from quantkit.models.interfaces import LanguageModel
from quantkit.ops import gpu
from quantkit.runtime.core import NextLogits, Request, StepOutput, StepPlan, TokenResult, sampled
from quantkit.runtime.kv_manager import KVCacheManager
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.sampler import PendingTokens, sample_async
from quantkit.runtime.scheduler import ChunkSizer
from quantkit.runtime.speculation import Speculator
from quantkit.runtime.trace import Timing


class ModelRunner:
    """Runs the model for an engine.

    Args:
        chunk: tokens after which policies act that act on chunks.
        sizer: decides how long a policy's work at a prompt's end may take while others decode.
        clock: returns the time in seconds.
        speculator: observes hidden states that its drafts go on from.
        denoised_rows: tokens of a block that a model writes at once, whose logits are needed; ``None``: it
            writes a token after the other.
    """

    def __init__(self, loaded: LoadedModel, chunk: int, sizer: ChunkSizer,
                 clock: Callable[[], float], speculator: Speculator | None = None,
                 denoised_rows: int | None = None) -> None:
        self._speculator, self._denoised_rows = speculator, denoised_rows
        self._loaded = loaded
        self._chunk = chunk
        self._sizer = sizer
        self._clock = clock
        self._awaited, self._deadline = False, 0.0  # whether others wait, and when their next tokens are due

    def run(self, step: StepPlan, decode: Sequence[Request], awaited: bool,
            drafts: Mapping[int, list[int]] = MappingProxyType({})) -> StepOutput:
        """Take a step's chunks through the model, together where several prompts may go, and a token of each
        request in ``decode``, which all keep their keys and values where steps are mixed.

        Args:
            step: the chunks, or the policy that goes on.
            decode: the requests that decode.
            awaited: others wait for a token meanwhile.
            drafts: by a request's id, tokens that may be the next ones, or of blocks that are written.
        """
        output = StepOutput()
        self._awaited, self._deadline = awaited, self._clock() + self._sizer.spare
        if step.deferred is not None:
            self._go_on(step.deferred, output)
        by_setting: dict[KVCacheManager, list[tuple[Request, int]]] = {}
        for request in decode:
            by_setting.setdefault(request.kv.manager, []).append((request, -1))
        for request, end in step.chunks:
            if self._needs_own_step(request, end):
                self._chunk_alone(request, end, output)
            else:
                by_setting.setdefault(request.kv.manager, []).append((request, end))
        for manager, rows in by_setting.items():
            self._mixed(manager, rows, drafts, output)
        output.computed_at = self._clock()
        return output

    def logits(self, requests: Sequence[Request], ids: torch.Tensor) -> torch.Tensor:
        """Decode one token ``ids [n, 1]`` of requests with one KV setting: logits ``[n, vocab]``."""
        batch = Batch(requests[0].kv.manager.cache, [request.kv.sequence for request in requests], "decode")
        batch.taps = self._taps
        logits = self._loaded.model(ids, cache=batch)[:, -1]
        self._tell_hidden(batch, requests)
        return logits

    def _needs_own_step(self, request: Request, end: int) -> bool:
        """Whether more is needed of a chunk than its last logits, or its policy acts afterwards."""
        text, manager = request.kv, request.kv.manager
        ends = text.computed_tokens < text.prompt_end == end
        again = text.computed_tokens >= text.prompt_end  # it decodes what it had before it was preempted
        return (not manager.supports_batched_prefill or (again and not manager.supports_mixed_batches)
                or request.fault.isolated or not text.reuses_prefix
                or (ends and manager.needs_own_last_chunk))

    def _phase(self, request: Request, end: int) -> Phase:
        if request.kv.computed_tokens >= request.kv.prompt_end:
            return "decode"  # what it had generated before it was preempted
        return ("prefill_end" if end == request.kv.prompt_end else
                "prefill" if end % self._chunk == 0 else "prefill_part")

    def _mixed(self, manager: KVCacheManager, rows: Sequence[tuple[Request, int]],
               drafts: Mapping[int, list[int]], output: StepOutput) -> None:
        """Take rows of one KV setting through the model at once; an end of −1 is a request that decodes."""
        tokens: list[Sequence[int]] = []
        phases: list[Phase] = []
        wanted: list[int] = []
        for request, end in rows:
            if end < 0:
                last = request.result.token_ids[-1:] if self._denoised_rows is None else ()
                tokens.append([*last, *drafts.get(request.id, ())])
                phases.append("decode")
                wanted.append(self._denoised_rows or len(tokens[-1]))
            else:
                tokens.append(request.kv.tokens_between(request.kv.computed_tokens, end))
                phases.append(self._phase(request, end))
                wanted.append(self._denoised_rows is None and end == len(request.prompt)
                              and not request.result.token_ids)
        tentative = [row for row, (request, end) in enumerate(rows) if end < 0 and request.id in drafts]
        try:
            batch = Batch(manager.cache, [request.kv.sequence for request, _ in rows], phases,
                          tentative=tentative)
            batch.taps = self._taps
            logits = self._loaded.model.forward(tokens, batch, wanted)
        except Exception as error:
            self._take_apart(rows, error, output)
            return
        self._tell_hidden(batch, [request for request, _ in rows])
        for request, end in rows:
            if end >= 0:
                output.prompt_tokens += end - request.kv.computed_tokens
                output.advanced.append((request, end))
                if end == request.kv.prompt_end:
                    output.ended.append(request)
        places = [row for row, wants in enumerate(wanted) if wants]
        if places:
            requests = [rows[row][0] for row in places]
            output.logits.append(NextLogits(
                requests, logits, [drafts.get(request.id, []) for request in requests] if tentative else None,
                batch if tentative else None, places))

    @property
    def _taps(self) -> tuple[int, ...]:
        return () if self._speculator is None else self._speculator.layers

    def _tell_hidden(self, batch: Batch, requests: Sequence[Request]) -> None:
        if self._speculator is not None:
            for row, parts in batch.hidden.items():
                states = parts[0] if len(parts) == 1 else torch.cat(parts)
                self._speculator.observe(requests[row], batch.starts[row], states)

    def _take_apart(self, rows: Sequence[tuple[Request, int]], error: Exception, output: StepOutput) -> None:
        """A step failed, and nobody knows whose fault it was: all lose what they have in the cache. Where
        nobody had a chunk, all of them fail."""
        if len(rows) == 1 or all(end < 0 for _, end in rows):
            output.failed += [(request, error) for request, _ in rows]
            return
        output.lost += [(request, error) for request, _ in rows]

    def _chunk_alone(self, request: Request, end: int, output: StepOutput) -> None:
        """Take one request's chunk through the model, and let its policy act."""
        model = self._loaded.model
        text = request.kv
        start = request.kv.computed_tokens
        ends = start < text.prompt_end == end
        try:
            batch = Batch(text.manager.cache, [text.sequence], self._phase(request, end), defers=ends)
            batch.taps = self._taps
            ids = gpu.sent(torch.tensor([text.tokens_between(start, end)]), model.device)
            logits = self._logits_of(request, ids, batch, end)
            self._tell_hidden(batch, [request])
            if ends:
                request.prefill.last_logits = None if logits is None else logits.clone()
                work = finish_prompt(model, batch, text.prompt, self._token_budget)
                if self._awaited and (batch.has_actions or batch.cache.policy.reread_prompt):
                    request.prefill.deferred = work
                else:
                    for _ in work:
                        pass
            output.acted = output.acted or ends
            output.prompt_tokens += end - start
            output.advanced.append((request, end))
            if ends and request.prefill.deferred is None:
                self._prompt_done(request, output)
        except Exception as error:  # of one request; the others go on
            output.failed.append((request, error))

    def _logits_of(self, request: Request, ids: torch.Tensor, batch: Batch, end: int
                   ) -> torch.Tensor | None:
        """Take ``ids [1, n]`` through the model. Returns the last token's logits ``[vocab]`` if they are
        needed."""
        model = self._loaded.model
        if request.prefill.pooler is not None:
            request.prefill.pooler.add(model.normalized(model.hidden(ids, cache=batch))[0])
            return None
        if request.has_unscored_prompt:
            rows = model(ids, cache=batch)[0]
            request.score_prompt(rows, end)
            return rows[-1]
        if end == len(request.prompt) and not request.result.token_ids and self._denoised_rows is None:
            return model(ids, cache=batch, last=torch.tensor([ids.shape[1] - 1]))[0]
        if "decode" in batch.phases:  # as it was decoded before it gave up its pages
            if ids.shape[1]:  # all of it may have been found
                model(ids, cache=batch, last=torch.tensor([ids.shape[1] - 1]))
            return None
        # nobody needs what follows: skip the head, which is a large part of a small model
        model.hidden(ids, cache=batch)
        return None

    def _go_on(self, request: Request, output: StepOutput) -> None:
        """Go on with what a policy does at a prompt's end, as long as others don't wait too long for it."""
        assert request.prefill.deferred is not None
        before = self._clock()
        try:
            for tokens in request.prefill.deferred:
                if tokens:
                    output.prompt_tokens += tokens
                    return
                output.acted = True
                now = self._clock()
                duration, before = now - before, now
                if before + duration > self._deadline:  # the next layer takes as long
                    return
            output.acted, request.prefill.deferred = True, None
            self._prompt_done(request, output)
        except Exception as error:
            output.failed.append((request, error))

    def _prompt_done(self, request: Request, output: StepOutput) -> None:
        """A prompt's policy has done all that it does at its end."""
        output.ended.append(request)
        last_logits, request.prefill.last_logits = request.prefill.last_logits, None
        if last_logits is not None and not request.result.token_ids:
            output.logits.append(NextLogits([request], last_logits[None]))

    def _token_budget(self) -> int:
        """Tokens that may go through the model now, in what is left of the gap."""
        if not self._awaited:
            return self._chunk
        return min(self._sizer.tokens_in(self._deadline - self._clock()), self._chunk)


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
        return self._model.runs_ahead and not any(request.sampler.on_host for request in requests)

    def _launch(self, requests: list[Request], ids: torch.Tensor) -> _PendingStep:
        """Begin a step of tokens ``ids [n, 1]``, and the choice of the next ones."""
        logits = self._runner.logits(requests, ids)
        samplers = [request.sampler for request in requests]
        histories = [request.kv.history if request.sampler.changes else [] for request in requests]
        return _PendingStep(requests, sample_async(logits, samplers, histories,
                                                   [request.logprobs for request in requests]))

    def _collect(self, pending: _PendingStep) -> Iterator[TokenResult]:
        try:
            tokens = pending.tokens.tokens()
        except Exception as error:  # of the step: a GPU reports it when it is waited for
            self._pending = None
            for request in pending.requests:
                if not request.done:
                    yield TokenResult(request, error=error)
            return
        for request, token, scores in zip(pending.requests, tokens, pending.tokens.scores()):
            if not request.done:
                self._timing.decode_tokens += 1
                yield sampled(request, token, scores=scores)
