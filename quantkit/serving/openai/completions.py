"""``/v1/completions``: https://platform.openai.com/docs/api-reference/completions/object."""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from pydantic import Field, model_validator

from quantkit.runtime.core import Completion, TokenInfo, check_ids
from quantkit.runtime.sampler import MAX_TOKENS
from quantkit.serving.conversation import choice_sampling
from quantkit.serving.errors import RefusedValue
from quantkit.serving.models import ServedEngine
from quantkit.serving.openai.chat import completion_usage
from quantkit.serving.openai.generation import MAX_LOGPROBS, MAX_N, GenerationRequest
from quantkit.serving.openai.logprobs import TextOffsets, text_logprobs
from quantkit.serving.reply import FINISH, Reply
from quantkit.serving.schema import FITS, Inputs, split_inputs, token_limit
from quantkit.serving.turns import TurnUsage, output_limit
from quantkit.serving.work import ChoiceJob, PromptReader, RequestWork, check_fits, check_size

DEFAULT_TOKENS = 16
"""Of an answer, as in OpenAI's API."""


class CompletionRequest(GenerationRequest):
    """Body of ``/v1/completions``."""

    ignored = GenerationRequest.ignored | {"parallel_tool_calls"}
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationRequest.neutral, "tools": ([],), "tool_choice": ("none", "auto"),
        "reasoning_effort": ("none",)}
    refused = GenerationRequest.refused | {"tools"}

    prompt: Inputs
    max_tokens: int | None = Field(default=None, ge=-1, le=MAX_TOKENS, description=f"16 by default. {FITS}")
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = Field(default=None, ge=1, le=MAX_N, description="Must be equal to n.")

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise RefusedValue("best_of", "best_of other than n is not supported")
        return self

    @property
    def limit(self) -> int | None:
        """Tokens of an answer; ``None``: as many as fit."""
        return token_limit(self.max_tokens, self.n_predict, DEFAULT_TOKENS)

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or more, as text or ids."""
        return split_inputs(self.prompt)


class CompletionReply(Reply):
    """The continuation of one or more prompts; with ``echo`` behind the prompt itself.

    Raises:
        ApiError, ContextLengthError: a prompt doesn't fit.
        QuantkitError: the tokenizer is at fault.
    """

    def __init__(self, model: ServedEngine, body: CompletionRequest) -> None:
        tokenizer = model.loaded.tokenizer
        self.model = model
        self.stream = body.stream
        self._body = body
        priority = model.priority(body.priority)
        check_size(len(body.prompts) * body.n, model.max_queue)
        reader = PromptReader(tokenizer, model.context, 1, "prompt")
        prompts = [reader.encode(p) if isinstance(p, str) else p for p in body.prompts]
        for prompt in prompts:  # before an unknown id is turned into text
            check_ids(model.loaded, prompt)
        self._texts = [p if isinstance(p, str) else tokenizer.decode(p, skip_special=False)
                       for p in body.prompts] if body.echo else [""] * len(prompts)
        # the engine always makes a token; where none is wanted it is dropped again
        self._silent = body.limit == 0
        shown = prompts if body.echo else [[]] * len(prompts)
        self._offsets = [TextOffsets(tokenizer, ids, text) for ids, text in zip(shown, self._texts)
                         for _ in range(body.n if body.logprobs is not None else 0)]
        sampling, kv = body.sampling(), model.kv(body.kv)
        self.structure = body.structure
        limit, param = 1 if self._silent else body.limit, body.limit_param
        limits = [output_limit(limit, model.context - len(prompt), param) for prompt in prompts]
        self.jobs = [ChoiceJob(prompt, choice_sampling(sampling, limit, i), body.logprobs,
                               body.echo and body.logprobs is not None, kv=kv, priority=priority,
                               cache_salt=body.cache_salt)
                     for prompt, limit in zip(prompts, limits, strict=True) for i in range(body.n)]
        check_fits(model.loaded, self.jobs)
        self._prompt_tokens = sum(map(len, prompts))
        self.id = f"cmpl-{uuid.uuid4().hex}"
        self._envelope = {"id": self.id, "object": "text_completion", "created": int(time.time()),
                          "model": model.name}

    async def body(self, work: RequestWork) -> dict[str, Any]:
        """``text_completion``."""
        tokens: defaultdict[int, list[TokenInfo]] = defaultdict(list)
        ends: dict[int, Completion] = {}
        async for event in work.events():
            if event.token is not None:
                tokens[event.choice].append(event.token)
            if event.done is not None:
                ends[event.choice] = event.done
        return {**self._envelope, "usage": self._usage(ends),
                "choices": [self._whole_choice(i, tokens[i], ends[i]) for i in range(len(self.jobs))]}

    async def events(self, work: RequestWork) -> AsyncIterator[dict[str, Any]]:
        """``text_completion`` with what is new, one after another."""
        ends: dict[int, Completion] = {}
        sent: defaultdict[int, int] = defaultdict(int)
        opened: set[int] = set()
        with_usage = self._body.stream_options.include_usage
        usage: dict[str, Any] = {"usage": None} if with_usage else {}

        def chunk(choice: dict[str, Any]) -> dict[str, Any]:
            return {**self._envelope, "choices": [choice], **usage}

        async for event in work.events():
            index = event.choice
            if index not in opened:
                opened.add(index)
                if self._body.echo:  # by now the prompt is scored
                    scored = work.requests[index].result.prompt_logprobs or []
                    yield chunk(self._choice(index, self._prompt(index), scored))
            if event.token is not None:
                sent[index] += len(event.token.text)
                if not self._silent and (event.token.text or self._body.logprobs is not None):
                    yield chunk(self._choice(index, event.token.text, [event.token]))
            if event.done is not None:
                ends[index] = event.done
                rest = "" if self._silent else event.done.text[sent[index]:]
                yield chunk(self._choice(index, rest, [], self._reason(event.done)) | {"logprobs": None})
        if with_usage:
            yield {**self._envelope, "choices": [], "usage": self._usage(ends)}

    def _whole_choice(self, index: int, tokens: list[TokenInfo], done: Completion) -> dict[str, Any]:
        scored = [*(done.prompt_logprobs or []), *([] if self._silent else tokens)]
        text = self._prompt(index) + ("" if self._silent else done.text)
        return self._choice(index, text, scored, self._reason(done))

    def _reason(self, done: Completion) -> str:
        return "length" if self._silent else FINISH[done.finish_reason]

    def _prompt(self, index: int) -> str:
        return self._texts[index // self._body.n]

    def _choice(self, index: int, text: str, tokens: list[TokenInfo],
                reason: str | None = None) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            logprobs = text_logprobs(tokens, self.model.texts, self._offsets[index])
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self, ends: dict[int, Completion]) -> dict[str, Any]:
        n = self._body.n
        new = 0 if self._silent else sum(len(done.token_ids) for done in ends.values())
        cached = sum(min(ends[i].cached_tokens for i in range(start, start + n))
                     for start in range(0, len(ends), n))
        predicted = [done.predicted for done in ends.values()]
        return completion_usage(TurnUsage(self._prompt_tokens, new, cached, 0,
                                          *(sum(counts) for counts in zip((0, 0), *predicted))))
