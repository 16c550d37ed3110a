"""The nouns of an engine: a request and its parts, what a step is to do, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from quantkit.kv.batch import Batch
from quantkit.runtime.kv_manager import CachedText
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.sampler import (
    ChosenScores,
    Sampler,
    Sampling,
    StopStrings,
    can_sample_on_device,
    draw_ahead,
    not_finite,
    sample_tokens,
)
from quantkit.structure.base import TokenConstraint
from quantkit.support.errors import QuantkitError, UsageError

FinishReason = Literal["stop", "length", "stop_string", "cancelled"]
LOGPROB_ROWS = 64
"""Positions whose log-probabilities are computed at once; each takes a vocabulary of float32."""
Pooling = Literal["mean", "last"]
"""``mean``: of all tokens; ``last``: of the last token."""
_STEPS = 2.0**32
"""Sums are kept as whole numbers of steps of this fineness: they don't depend on their order."""
_LARGEST = 2.0**17


class EngineFull(QuantkitError):
    """The queue is full."""


class EngineClosed(QuantkitError):
    """The engine takes no more requests."""


class EngineDeadError(QuantkitError):
    """An error outside of any request has ended the engine's thread: nothing is answered any more.

    Attributes:
        kind: the name of that error's class.
    """

    def __init__(self, error: BaseException) -> None:
        first = str(error).strip().partition("\n")[0][:300]
        super().__init__("the engine has stopped", why=": ".join(filter(None, (type(error).__name__, first))),
                         next="start the server again: quantkit serve-local")
        self.kind = type(error).__name__


class ContextLengthError(UsageError):
    """Prompt and answer together are longer than the model's context.

    Attributes:
        context: tokens of prompt and answer, and the limit.
    """

    def __init__(self, prompt: int, answer: int, limit: int) -> None:
        super().__init__(f"the prompt has {prompt} tokens and {answer} are to follow",
                         why=f"the model was made for {limit} in all",
                         next=f"shorten the prompt, or --max-tokens {max(limit - prompt, 1)}")
        self.context = (prompt + answer, limit)


# -- results

@dataclass(frozen=True)
class TokenInfo:
    """One token and what became known with it.

    Attributes:
        id: the token's id.
        text: the text that became certain with it: often a word, sometimes nothing, sometimes the text of
            several tokens.
        logprob: natural logarithm of its probability as the model has it: before bias, penalties, constraint,
            temperature and filters. ``None`` if it wasn't requested, and for a prompt's first token.
        top: the most likely ids with their log-probabilities, in falling order.
    """

    id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Completion:
    """One prompt's continuation.

    Attributes:
        prompt_tokens: length of the prompt.
        token_ids: the new ids, including the end-of-sequence token or the tokens of the stop string.
        text: their text up to the stop string, without special tokens but those that were to be kept.
        finish_reason: ``stop`` (the model ended the sequence, or its constraint is complete),
            ``stop_string``, ``length`` (``max_tokens`` were generated), or ``cancelled``.
        prompt_logprobs: scores of the prompt's tokens, if requested; their text is empty.
        stop_string: the stop string that ended it.
        cached_tokens: prompt tokens whose keys and values were there already.
        embedding: the prompt's embedding, float32 ``[hidden]``, if requested.
        drafted_tokens, accepted_tokens: tokens that were drafted for it, and those of them that were right;
            where blocks are written, masks that steps saw, and tokens that they committed.
        denoising_steps: the number of steps that wrote its blocks; 0: it was written token by token.
    """

    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = "length"
    prompt_logprobs: list[TokenInfo] | None = None
    stop_string: str | None = None
    cached_tokens: int = 0
    embedding: torch.Tensor | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    denoising_steps: int = 0

    @property
    def predicted(self) -> tuple[int, int]:
        """Tokens of drafts that were right, and that were in vain."""
        right = self.accepted_tokens
        return (0, 0) if self.denoising_steps else (right, self.drafted_tokens - right)


class Pooler:
    """Pools the normalized hidden states of a prompt that comes in chunks into one vector. How the prompt was
    cut makes no difference.

    Args:
        pooling: says which tokens' states count.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum: torch.Tensor | None = None
        self._count = 0

    def add(self, hidden: torch.Tensor) -> None:
        """Add a chunk's ``[n, hidden]``. Raises QuantkitError: it isn't finite."""
        rows = hidden[-1:] if self._pooling == "last" else hidden
        if not bool(torch.isfinite(rows).all()):
            raise not_finite()
        exact = (rows.double().clamp(-_LARGEST, _LARGEST) * _STEPS).round().long().sum(0)
        if self._sum is None or self._pooling == "last":
            self._sum, self._count = exact, len(rows)
        else:
            self._sum, self._count = self._sum + exact, self._count + len(rows)

    def clear(self) -> None:
        self._sum, self._count = None, 0

    def result(self) -> torch.Tensor:
        """float32 ``[hidden]``, not normalized."""
        assert self._sum is not None
        return (self._sum.double() / (_STEPS * self._count)).float().cpu()


# -- a request

class RequestLabel(NamedTuple):
    """Names a request in the trace.

    Attributes:
        id: the name that a client knows it by.
        choice: number among several choices with this id; ``None``: there is one.
        tenant: the client that it belongs to, where a server tells its clients apart.
    """

    id: str
    choice: int | None = None
    tenant: bytes = b""


@dataclass(slots=True)
class TracedState:
    """Trace bookkeeping of a request; the trace alone writes it.

    Attributes:
        since: seconds at which its last span ended; at first when it was submitted.
        is_waiting: whether it waits for a chunk of its text.
        ended: whether the trace has its end.
        tokens, drafted, accepted: tokens of its answer that the trace has.
    """

    since: float
    is_waiting: bool = True
    ended: bool = False
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class ScheduleState:
    """A request's place among others; the scheduler alone writes it.

    Attributes:
        arrived_at: ``time.perf_counter()`` seconds at which it was submitted.
        admitted_at: seconds at which its prompt's turn came; 0: not yet.
        arrival_tokens: prompt tokens that the engine had read when it arrived.
        deadline_tokens: the number of prompt tokens read after which no later prompt can pass this one.
        is_waiting_for_prefix: whether it waits for another's prompt, which begins like its own.
        is_awaited: whether another waits for its prompt in this step.
    """

    arrived_at: float
    admitted_at: float = 0.0
    arrival_tokens: int = 0
    deadline_tokens: int = 0
    is_waiting_for_prefix: bool = False
    is_awaited: bool = False


@dataclass(slots=True)
class PrefillState:
    """What is kept of a prompt until it has been read; the runner alone writes it.

    Attributes:
        pooler: pools its embedding; ``None``: none is wanted.
        deferred: the work that its KV policy still has at the prompt's end; each item does a part of it.
        last_logits: ``[1, vocab]`` of the prompt's last token, kept until that is done.
    """

    pooler: Pooler | None
    deferred: Generator[int, None, None] | None = None
    last_logits: torch.Tensor | None = None

    def abandon(self) -> None:
        """Forget it: the request has ended, or gave up its pages."""
        if self.deferred is not None:
            self.deferred.close()
        self.deferred = self.last_logits = None


@dataclass(slots=True)
class FaultState:
    """Failed steps of a request; the engine alone writes it.

    Attributes:
        retries: how often a step failed that it shared with others.
        isolated: its chunks go through the model by themselves, because a step that it was in failed.
    """

    retries: int = 0
    isolated: bool = False


class Request:
    """A request's handle.

    Args:
        number: its number within the engine.
        logprobs: the number of alternatives whose log-probabilities come with each token; ``None``: none, and
            not the token's own.
        echo: also score the prompt's tokens.
        pooling: compute the prompt's embedding by this pooling, and no token.
        priority: requests with a lower one go first.
        on_token, on_done, on_error: called on the engine's thread.
        constraint: says which tokens may follow, and when the answer is complete; no other request has it.
        keep_special: special tokens whose text belongs to the answer's, such as those that begin a tool call.
        label: names it in the engine's trace.
        cache_salt: only requests with the same salt share prefixes.

    Attributes:
        id: its number within the engine.
        result: grows while it runs.
        done: whether nothing more will come.
        cancelled: whether somebody asked for an early end.
        sampler: chooses its tokens.
        kv: its text in the KV cache; written by the cache's manager.
        schedule, prefill, fault, trace: what scheduler, runner, engine and trace note about it.
    """

    def __init__(self, number: int, loaded: LoadedModel, prompt: Sequence[int], sampling: Sampling,
                 logprobs: int | None = None, echo: bool = False, pooling: Pooling | None = None,
                 priority: int = 0, on_token: Callable[[TokenInfo], None] | None = None,
                 on_done: Callable[[Request], None] | None = None,
                 on_error: Callable[[BaseException], None] | None = None,
                 constraint: TokenConstraint | None = None,
                 keep_special: frozenset[int] = frozenset(), label: RequestLabel | None = None,
                 cache_salt: bytes = b"") -> None:
        self.id = number
        self.prompt = list(prompt)
        self.sampling = sampling
        self.priority = priority
        self.label = label or RequestLabel(f"request {number}")
        self.result = Completion(len(self.prompt), prompt_logprobs=[] if echo else None)
        self.done = self.cancelled = False
        self.sampler = Sampler(sampling, len(self.prompt), constraint)
        # an embedding and scores need every token of the prompt
        self.kv = CachedText(self.prompt, self.result.token_ids, len(self.prompt) + sampling.max_tokens,
                             reuses_prefix=pooling is None and not echo, salt=cache_salt,
                             diffusion=loaded.config.diffusion)
        self.schedule = ScheduleState(time.perf_counter())
        self.prefill = PrefillState(None if pooling is None else Pooler(pooling))
        self.fault = FaultState()
        self.trace = TracedState(self.schedule.arrived_at)
        self.logprobs = logprobs
        self._on_token = on_token
        self._on_done = on_done
        self._on_error = on_error
        self._constraint, self._stops = constraint, StopStrings(sampling.stop)
        self._stream, self._eos = loaded.tokenizer.stream(keep_special), loaded.tokenizer.eos_ids

    @property
    def order(self) -> tuple[int, int]:
        return self.priority, self.id

    @property
    def needs_logits(self) -> bool:
        """Whether the logits that a token was chosen from are needed."""
        return self.logprobs is not None

    @property
    def tokens_left(self) -> int:
        return self.sampling.max_tokens - len(self.result.token_ids)

    def is_last(self, token: int, more: int) -> bool:
        """Whether an answer that gets ``more`` tokens, of which ``token`` is the last, ends with it, whatever
        its text is."""
        sampling = self.sampling
        return (token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos)
                or more >= self.tokens_left)

    @property
    def has_unscored_prompt(self) -> bool:
        """Whether prompt tokens are still to be scored."""
        scored = self.result.prompt_logprobs
        return scored is not None and len(scored) < len(self.prompt)

    def cancel(self) -> None:
        """Ask for an early end. It takes effect at the engine's next step."""
        self.cancelled = True

    def restart(self) -> None:
        """Its prompt is read anew: forget what was gathered of it."""
        self.prefill.abandon()
        if self.prefill.pooler is not None:
            self.prefill.pooler.clear()
        if self.has_unscored_prompt:
            self.result.prompt_logprobs = []

    def score_prompt(self, logits: torch.Tensor, end: int) -> None:
        """Score prompt tokens by ``logits [T, vocab]`` of the chunk that ends before token ``end``."""
        scored = self.result.prompt_logprobs
        assert scored is not None
        if not scored:
            scored.append(TokenInfo(self.prompt[0], ""))
        first = end - logits.shape[0]
        for start in range(0, logits.shape[0], LOGPROB_ROWS):
            rows = logits[start:start + LOGPROB_ROWS].float().log_softmax(-1)
            for offset, row in enumerate(rows):
                place = first + start + offset + 1
                if place < len(self.prompt):
                    scored.append(self._info(self.prompt[place], "", row))

    def append(self, token: int, logits: torch.Tensor | None, scores: ChosenScores | None = None) -> None:
        """Append the next token and tell the listener.

        Args:
            logits: ``[vocab]`` that it was chosen from; needed only with :attr:`needs_logits`, and without
                ``scores``.
            scores: what is asked for of them.

        Raises:
            ConstraintError: its constraint refuses the token.
        """
        ids = self.result.token_ids
        result = self.result
        sampling = self.sampling
        if self._constraint is not None:
            self._constraint.accept(token)
        ids.append(token)
        ended, shown = False, True
        if token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos):
            ended, shown = True, False
            result.finish_reason = "stop"
        elif self._constraint is not None and self._constraint.ended:
            ended = True
            result.finish_reason = "stop"
        elif len(ids) >= sampling.max_tokens:
            ended = True
        text = self._stops.push(self._stream.push(token) if shown else "")
        if ended:
            text += self._stops.push(self._stream.finish())
        if self._stops.stop is not None:
            ended = True
            result.finish_reason, result.stop_string = "stop_string", self._stops.stop
        elif ended:
            text += self._stops.finish()
        result.text += text
        if self._on_token is not None:
            if scores is not None:
                self._on_token(TokenInfo(token, text, scores.logprob, scores.top))
            else:
                row = None
                if self.needs_logits:
                    assert logits is not None
                    row = logits.float().log_softmax(-1)
                self._on_token(self._info(token, text, row))
        if ended:
            self.finish()

    def finish(self, reason: FinishReason | None = None) -> None:
        """Mark the request as finished and tell the listener."""
        if reason is not None:
            self.result.finish_reason = reason
        self.done = True
        if self._on_done is not None:
            self._on_done(self)

    def fail(self, error: BaseException) -> None:
        """Mark the request as finished by an error; without a listener for errors, raise it."""
        self.done = True
        if self._on_error is None:
            raise error
        self._on_error(error)

    def _info(self, token: int, text: str, row: torch.Tensor | None) -> TokenInfo:
        if row is None:
            return TokenInfo(token, text)
        top: tuple[tuple[int, float], ...] = ()
        if self.logprobs:
            values, ids = row.topk(min(self.logprobs, row.numel()))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenInfo(token, text, float(row[token]), top)


def check_request(loaded: LoadedModel, prompt: Sequence[int], sampling: Sampling) -> None:
    """Raises UsageError: the prompt is empty, is too long, or it or ``logit_bias`` has an unknown id."""
    if not prompt:
        raise UsageError("a prompt is empty", why="there is no token to continue from",
                         next="give at least one character")
    check_ids(loaded, prompt)
    if (largest := max((token for token, _ in sampling.logit_bias), default=0)) >= loaded.config.vocab_size:
        raise UsageError(f"logit_bias names token {largest}, which the model doesn't know",
                         why=f"ids go from 0 to {loaded.config.vocab_size - 1}")
    if len(prompt) + sampling.max_tokens > loaded.config.max_position_embeddings:
        raise ContextLengthError(len(prompt), sampling.max_tokens, loaded.config.max_position_embeddings)


def check_ids(loaded: LoadedModel, prompt: Sequence[int]) -> None:
    """Raises UsageError: an id is unknown."""
    if prompt and not 0 <= min(prompt) <= max(prompt) < loaded.config.vocab_size:
        raise UsageError("a prompt has a token that the model doesn't know",
                         why=f"ids go from 0 to {loaded.config.vocab_size - 1}")


# -- a step

@dataclass
class StepPlan:
    """What runs in a step.

    Attributes:
        decode: requests that get a token.
        chunks: requests whose text goes on, and where their chunks end in it.
        deferred: a request whose KV policy goes on with what it does at the prompt's end.
    """

    decode: list[Request] = field(default_factory=list)
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    deferred: Request | None = None

    @property
    def reading(self) -> list[Request]:
        """Requests whose text goes on, or whose policy acts at its prompt's end."""
        return [request for request, _ in self.chunks] + ([] if self.deferred is None else [self.deferred])


@dataclass(frozen=True, slots=True)
class TokenResult:
    """A request's next token, or why there is none. The engine gives it to the request.

    Attributes:
        logits: ``[vocab]`` that the token was chosen from, if they are there.
        scores: what was asked for of them, if a GPU has worked it out.
        error: the reason why the request fails.
    """

    request: Request
    token: int = -1
    logits: torch.Tensor | None = None
    scores: ChosenScores | None = None
    error: Exception | None = None


@dataclass
class NextLogits:
    """What tokens are chosen from.

    Attributes:
        requests: the requests that get a token now.
        logits: ``[n, vocab]``: a row for each of them, and behind it those of its draft.
        drafts: the tokens that were drafted for each request.
        batch: the step's batch, if any have drafts: tokens may have to be taken back.
        places: the rows of these requests in the batch.
    """

    requests: list[Request]
    logits: torch.Tensor
    drafts: list[list[int]] | None = None
    batch: Batch | None = None
    places: list[int] = field(default_factory=list)

    def sample(self) -> list[TokenResult]:
        """The next token of each request that hasn't ended; a row a request, without drafts."""
        samplers = [request.sampler for request in self.requests]
        histories = [request.kv.history if request.sampler.changes else [] for request in self.requests]
        tokens = sample_tokens(self.logits, samplers, histories)
        return [sampled(self.requests[place], token, row)
                for place, (token, row) in enumerate(zip(tokens, self.logits, strict=True))
                if not self.requests[place].done]

    def draw_ahead(self) -> list[list[int | QuantkitError] | None]:
        """For each request the tokens of all its rows, as if its drafts were right, where a GPU chooses them
        at once; ``None`` where each depends on those before it."""
        assert self.drafts is not None
        counts = [1 + len(draft) for draft in self.drafts]
        results: list[list[int | QuantkitError] | None] = [None] * len(counts)
        places = [place for place, request in enumerate(self.requests) if not request.sampler.changes
                  and can_sample_on_device(self.logits, [request.sampler])]
        if places:
            parts = self.logits.split(counts)
            logits = self.logits if len(places) == len(counts) else torch.cat([parts[at] for at in places])
            drawn = iter(draw_ahead(
                logits, [self.requests[at].sampler for at in places for _ in range(counts[at])],
                [ahead for at in places for ahead in range(counts[at])]))
            for at in places:
                results[at] = [next(drawn) for _ in range(counts[at])]
        return results


def sampled(request: Request, token: int | QuantkitError, logits: torch.Tensor | None = None,
            scores: ChosenScores | None = None) -> TokenResult:
    """What a sampler gave as a result; a plugin's codec may be to blame for an error."""
    if isinstance(token, QuantkitError):
        return TokenResult(request, error=request.kv.codec_fault() or token)
    return TokenResult(request, token, logits, scores)


@dataclass
class StepOutput:
    """What came of a step.

    Attributes:
        logits: the logits that tokens are chosen from now.
        advanced: requests whose chunk went through the model, and where it ends in their text.
        ended: requests whose prompt has been read, and whose policy has acted.
        failed: requests that failed, and why.
        lost: requests that shared a step which failed, and why; what they had in the cache must be computed
            anew.
        prompt_tokens: tokens of prompts that went through the model.
        acted: whether policies acted, so that the step's time says nothing about tokens.
        computed_at: the time at which the model was done; seconds of the engine's clock.
    """

    logits: list[NextLogits] = field(default_factory=list)
    advanced: list[tuple[Request, int]] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    failed: list[tuple[Request, Exception]] = field(default_factory=list)
    lost: list[tuple[Request, Exception]] = field(default_factory=list)
    prompt_tokens: int = 0
    acted: bool = False
    computed_at: float = 0.0
