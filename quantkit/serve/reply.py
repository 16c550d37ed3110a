"""Builds the answer to a request, whole or streamed: shared by chat and plain completions."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from quantkit.runtime.engine import Engine
from quantkit.runtime.loader import LoadedModel
from quantkit.runtime.request import Completion, ContextLengthError, TokenInfo
from quantkit.serve.logprobs import TokenTexts
from quantkit.serve.schema import GenerationRequest
from quantkit.serve.work import ChoiceJob, RequestWork

FINISH = {"stop": "stop", "stop_string": "stop", "length": "length"}
"""Why a sequence ended, in OpenAI's words: whether by the model or by a stop text is one thing there."""


@dataclass(frozen=True)
class ServedEngine:
    """What is served.

    Attributes:
        engine: runs it.
        loaded: its tokenizer, shape and label.
        name: as requests call it.
        texts: of its tokens.
        parse_special: whether control tokens written out in messages are control tokens.
        created: Unix time, seconds.
    """

    engine: Engine
    loaded: LoadedModel
    name: str
    texts: TokenTexts
    parse_special: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def context(self) -> int:
        """Tokens of prompt and answer together."""
        return self.loaded.config.max_position_embeddings


class GenerationResponse(ABC):
    """One request's answer.

    Args:
        model: what answers.
        body: the request.
        prompts: token ids of each prompt; there are ``body.n`` jobs for each.
        jobs: one a choice, in the order of their indices.

    Raises:
        ContextLengthError: one doesn't fit.
    """

    prefix: str
    whole_kind: str
    piece_kind: str

    def __init__(self, model: ServedEngine, body: GenerationRequest, prompts: Sequence[Sequence[int]],
                 jobs: list[ChoiceJob]) -> None:
        self.model, self.body, self.jobs = model, body, jobs
        for job in jobs:  # here, where nobody waits, rather than when they are queued
            if len(job.prompt) + job.sampling.max_tokens > model.context:
                raise ContextLengthError(len(job.prompt), job.sampling.max_tokens, model.context)
        self._prompt_tokens = sum(map(len, prompts))
        self._envelope = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()),
                          "model": model.name}

    async def whole(self, work: RequestWork) -> dict[str, Any]:
        """The answer as one object, when everything is there."""
        tokens: defaultdict[int, list[TokenInfo]] = defaultdict(list)
        ends: dict[int, Completion] = {}
        async for event in work.events():
            if event.token is not None:
                tokens[event.choice].append(event.token)
            if event.done is not None:
                ends[event.choice] = event.done
        choices = [self.choice(i, tokens[i], ends[i]) for i in range(len(self.jobs))]
        return {**self._envelope, "object": self.whole_kind, "choices": choices,
                "usage": self._usage(ends.values())}

    async def pieces(self, work: RequestWork) -> AsyncIterator[dict[str, Any]]:
        """The answer as it comes."""
        ends: list[Completion] = []
        sent: defaultdict[int, int] = defaultdict(int)
        opened = set()
        usage = {"usage": None} if self.body.stream_options.include_usage else {}

        def chunk(choice: dict[str, Any]) -> dict[str, Any]:
            return {**self._envelope, "object": self.piece_kind, "choices": [choice], **usage}

        async for event in work.events():
            if event.choice not in opened:
                opened.add(event.choice)
                if (first := self.opening(event.choice, work)) is not None:
                    yield chunk(first)
            if event.token is not None:
                sent[event.choice] += len(event.token.text)
                if (piece := self.piece(event.choice, event.token)) is not None:
                    yield chunk(piece)
            if event.done is not None:
                ends.append(event.done)
                yield chunk(self.closing(event.choice, event.done, event.done.text[sent[event.choice]:]))
        if usage:
            yield {**self._envelope, "object": self.piece_kind, "choices": [], "usage": self._usage(ends)}

    @abstractmethod
    def choice(self, index: int, tokens: list[TokenInfo], done: Completion) -> dict[str, Any]:
        """One choice of the whole answer."""

    @abstractmethod
    def opening(self, index: int, work: RequestWork) -> dict[str, Any] | None:
        """What comes before a choice's first token."""

    @abstractmethod
    def piece(self, index: int, token: TokenInfo) -> dict[str, Any] | None:
        """A token; ``None`` if it has nothing to say."""

    @abstractmethod
    def closing(self, index: int, done: Completion, rest: str) -> dict[str, Any]:
        """A choice's end, with text that no token brought."""

    def count(self, done: Completion) -> int:
        """New tokens of a choice."""
        return len(done.token_ids)

    def _usage(self, ends: Any) -> dict[str, int]:
        new = sum(map(self.count, ends))
        return {"prompt_tokens": self._prompt_tokens, "completion_tokens": new,
                "total_tokens": self._prompt_tokens + new}
