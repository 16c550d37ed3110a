"""One request on its way through the engine: its prompt, its tokens so far, and the text to show."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch

from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.pooling import Pooler, Pooling
from quantkit.runtime.sampler import Sampler, Sampling
from quantkit.runtime.stop import StopStrings
from quantkit.runtime.trace import RequestLabel, TracedState
from quantkit.structure.base import TokenConstraint
from quantkit.support.errors import UsageError

if TYPE_CHECKING:
    from quantkit.runtime.kv_manager import KVCacheManager

FinishReason = Literal["stop", "length", "stop_string", "cancelled"]
LOGPROB_ROWS = 64
"""Positions whose log-probabilities are computed at once; each takes a vocabulary of float32."""


class Status(enum.Enum):
    """Where a request is on its way through the engine."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


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


@dataclass(frozen=True)
class TokenInfo:
    """One token and what became known with it.

    Attributes:
        id: the token.
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
        prompt_logprobs: of each prompt token, if requested; their text is empty.
        stop_string: the one that ended it.
        cached_tokens: prompt tokens whose keys and values were there already.
        embedding: the prompt's, float32 ``[hidden]``, if requested.
        drafted_tokens, accepted_tokens: tokens that were drafted for it, and those of them that were right.
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


class Request:
    """A request's handle.

    Args:
        number: its number within the engine.
        loaded: the model.
        prompt: token ids.
        sampling: how the prompt is continued.
        logprobs: how many alternatives' log-probabilities each token comes with; ``None``: not even its own.
        echo: also score the prompt's tokens.
        pooling: compute the prompt's embedding by this pooling, and no token.
        priority: requests with a lower one go first.
        on_token, on_done, on_error: called on the engine's thread.
        constraint: which tokens the answer may have, and when it is complete; this request's own.
        keep_special: special tokens whose text belongs to the answer's, such as those that begin a tool call.
        label: names it in the engine's trace.
        cache_salt: only requests with the same salt share prefixes.

    Attributes:
        id: its number within the engine.
        result: grows while it runs.
        status: where it is on its way.
        cancelled: whether somebody asked for an early end.
        computed_tokens: tokens of :attr:`tokens` whose keys and values are in the cache.
        sequence: its number in the KV cache; −1 until it is admitted.
        sampler: chooses its tokens.
        kv: its cache's manager; set by the engine.
        deferred: what its KV policy still has to do at the prompt's end; each item does a part of it.
        last_logits: ``[1, vocab]`` of the prompt's last token, kept until that is done.
        preemptions: how often it gave up its pages.
        retries: how often a step failed that it shared with others.
        waited: whether it waits for another's prompt, which begins like its own.
        awaited: whether another waits for its prompt in this step.
        isolated: its chunks go through the model by themselves, because a step that it was in failed.
        spoiled: whether a step failed in the middle, so that nobody may read what it has in the cache.
        block_names: of its text's blocks, see :func:`quantkit.kv.prefix.block_names`.
        came: prompt tokens that the engine had read when it came.
        due: the number of prompt tokens read after which no later prompt can pass this one.
        arrived_at, admitted_at: ``time.perf_counter()`` seconds; 0: not yet.
        traced: what of it is in the engine's trace.
    """

    def __init__(self, number: int, loaded: LoadedModel, prompt: Sequence[int], sampling: Sampling,
                 logprobs: int | None = None, echo: bool = False, pooling: Pooling | None = None,
                 priority: int = 0, on_token: Callable[[TokenInfo], None] | None = None,
                 on_done: Callable[[Request], None] | None = None,
                 on_error: Callable[[BaseException], None] | None = None,
                 constraint: TokenConstraint | None = None,
                 keep_special: frozenset[int] = frozenset(), label: RequestLabel | None = None,
                 cache_salt: bytes = b"") -> None:
        self.id, self.prompt, self.sampling = number, list(prompt), sampling
        self.result = Completion(len(self.prompt), prompt_logprobs=[] if echo else None)
        self.status, self.cancelled = Status.WAITING, False
        self.computed_tokens, self.sequence = 0, -1
        self.came = self.due = 0
        self.pool = None if pooling is None else Pooler(pooling)
        self.priority, self.preemptions, self.retries = priority, 0, 0
        self.isolated = self.waited = self.awaited = self.spoiled = False
        self.kv: KVCacheManager
        self.deferred: Generator[int, None, None] | None = None
        self.last_logits: torch.Tensor | None = None
        self.block_names: list[bytes] = []
        self.cache_salt = cache_salt
        self.arrived_at, self.admitted_at = time.perf_counter(), 0.0
        self.label, self.traced = label or RequestLabel(f"request {number}"), TracedState(self.arrived_at)
        self._logprobs = logprobs
        self._on_token, self._on_done, self._on_error = on_token, on_done, on_error
        self.sampler = Sampler(sampling, len(self.prompt), constraint)
        self._constraint, self._stops = constraint, StopStrings(sampling.stop)
        self._stream, self._eos = loaded.tokenizer.stream(keep_special), loaded.tokenizer.eos_ids

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""
        return self.status is Status.FINISHED

    @property
    def max_length(self) -> int:
        """Tokens of prompt and answer, at most."""
        return len(self.prompt) + self.sampling.max_tokens

    @property
    def tokens(self) -> list[int]:
        """The tokens that must be in the cache before the next one can be chosen, but for the one that is fed
        for it."""
        return self.prompt + self.result.token_ids[:-1]

    @property
    def length(self) -> int:
        """Number of :attr:`tokens`."""
        return len(self.prompt) + max(0, len(self.result.token_ids) - 1)

    def tokens_between(self, start: int, end: int) -> list[int]:
        """``tokens[start:end]``."""
        return self.prompt[start:end] if end <= len(self.prompt) else self.tokens[start:end]

    @property
    def reuses_prefix(self) -> bool:
        """Whether it may begin with keys and values that are there: nothing else of its prompt is needed."""
        return self.pool is None and not self.wants_prompt_logprobs

    @property
    def begun(self) -> bool:
        """Whether something of its prompt was computed for it."""
        return self.computed_tokens > self.result.cached_tokens or self.preemptions > 0

    @property
    def order(self) -> tuple[int, int]:
        """Requests go in this order."""
        return self.priority, self.id

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether logits of every prompt position are needed."""
        return self.result.prompt_logprobs is not None

    def restart(self) -> None:
        """It gave up its pages: all that was computed of its text is computed again."""
        self.computed_tokens, self.status, self.last_logits = 0, Status.WAITING, None
        self.preemptions += 1
        self.spoiled = False
        if self.pool is not None:
            self.pool.clear()
        if self.scores_prompt:
            self.result.prompt_logprobs = []

    def cancel(self) -> None:
        """Ask for an early end. It takes effect at the engine's next step."""
        self.cancelled = True

    @property
    def scores_prompt(self) -> bool:
        """Whether prompt tokens are still to be scored."""
        scored = self.result.prompt_logprobs
        return scored is not None and len(scored) < len(self.prompt)

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

    @property
    def history(self) -> list[int]:
        """Prompt and answer so far."""
        return self.prompt + self.result.token_ids

    @property
    def wants_logits(self) -> bool:
        """Whether the logits that a token was chosen from are needed."""
        return self._logprobs is not None

    @property
    def tokens_left(self) -> int:
        """How many tokens may still come."""
        return self.sampling.max_tokens - len(self.result.token_ids)

    @property
    def at_last_token(self) -> bool:
        """Whether the next token reaches ``max_tokens``."""
        return self.tokens_left <= 1

    def append(self, token: int, logits: torch.Tensor | None) -> None:
        """Append the next token and tell the listener.

        Args:
            token: its id.
            logits: ``[vocab]`` that it was chosen from; needed only with :attr:`wants_logits`.

        Raises:
            ConstraintError: its constraint refuses the token.
        """
        ids, result = self.result.token_ids, self.result
        if self._constraint is not None:
            self._constraint.accept(token)
        ids.append(token)
        ended, shown = False, True
        sampling = self.sampling
        if token in sampling.stop_token_ids or (token in self._eos and not sampling.ignore_eos):
            ended, shown, result.finish_reason = True, False, "stop"
        elif self._constraint is not None and self._constraint.ended:
            ended, result.finish_reason = True, "stop"
        elif len(ids) >= self.sampling.max_tokens:
            ended = True
        text = self._stops.push(self._stream.push(token) if shown else "")
        if ended:
            text += self._stops.push(self._stream.finish())
        if self._stops.found is not None:
            ended, result.finish_reason, result.stop_string = True, "stop_string", self._stops.found
        elif ended:
            text += self._stops.finish()
        result.text += text
        if self._on_token is not None:
            row = None
            if self.wants_logits:
                assert logits is not None
                row = logits.float().log_softmax(-1)
            self._on_token(self._info(token, text, row))
        if ended:
            self.finish()

    def finish(self, reason: FinishReason | None = None) -> None:
        """Mark the request as finished and tell the listener."""
        if reason is not None:
            self.result.finish_reason = reason
        self.status = Status.FINISHED
        if self._on_done is not None:
            self._on_done(self)

    def fail(self, error: BaseException) -> None:
        """Mark the request as finished by an error; without a listener for errors, raise it."""
        self.status = Status.FINISHED
        if self._on_error is None:
            raise error
        self._on_error(error)

    def _info(self, token: int, text: str, row: torch.Tensor | None) -> TokenInfo:
        if row is None:
            return TokenInfo(token, text)
        top: tuple[tuple[int, float], ...] = ()
        if self._logprobs:
            values, ids = row.topk(min(self._logprobs, row.numel()))
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
