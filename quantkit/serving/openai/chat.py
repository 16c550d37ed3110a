"""``/v1/chat/completions``: https://platform.openai.com/docs/api-reference/chat/object."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from quantkit.runtime.core import TokenInfo
from quantkit.serving.models import ServedEngine
from quantkit.serving.openai.chat_request import ChatRequest
from quantkit.serving.openai.logprobs import chat_logprobs
from quantkit.serving.reply import FINISH, Reply
from quantkit.serving.turns import NextTurn, Turn, TurnCall, TurnEnd, TurnUsage
from quantkit.serving.work import RequestWork
from quantkit.structure.base import ReasoningDelta, ToolCallDelta, TurnDelta


def completion_usage(usage: TurnUsage) -> dict[str, Any]:
    """``usage`` of the chat and text completions."""
    return {"prompt_tokens": usage.prompt, "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
            "completion_tokens_details": {"reasoning_tokens": usage.reasoning,
                                          "accepted_prediction_tokens": usage.accepted,
                                          "rejected_prediction_tokens": usage.rejected}}


class ChatReply(Reply):
    """The assistant's next turn. Raises what :class:`NextTurn` does."""

    def __init__(self, model: ServedEngine, body: ChatRequest) -> None:
        self.model = model
        self.stream = body.stream
        self._body = body
        self._turns = NextTurn(model, body.conversation())
        self.jobs, self.structure = self._turns.jobs, self._turns.structure
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._envelope = {"id": self.id, "created": int(time.time()), "model": model.name}

    async def body(self, work: RequestWork) -> dict[str, Any]:
        """``chat.completion``."""
        turns = await self._turns.whole(work)
        return {**self._envelope, "object": "chat.completion",
                "choices": [self._choice(i, turn) for i, turn in enumerate(turns)],
                "usage": completion_usage(self._turns.usage(turn.end for turn in turns))}

    async def events(self, work: RequestWork) -> AsyncIterator[dict[str, Any]]:
        """``chat.completion.chunk`` after another."""
        ends: list[TurnEnd] = []
        opened: set[int] = set()
        with_usage = self._body.stream_options.include_usage
        usage: dict[str, Any] = {"usage": None} if with_usage else {}

        def chunk(choices: list[dict[str, Any]]) -> dict[str, Any]:
            return {**self._envelope, "object": "chat.completion.chunk", "choices": choices, **usage}

        async for event in self._turns.events(work):
            if event.choice not in opened:
                opened.add(event.choice)
                yield chunk([_delta(event.choice, {"role": "assistant", "content": "", "refusal": None})])
            token = event.token if self._body.logprobs else None
            deltas = [_written(delta) for delta in event.deltas] or ([{"content": ""}] if token else [])
            for delta in deltas:
                logprobs = None if token is None else self._logprobs([token])
                yield chunk([_delta(event.choice, delta, logprobs)])
                token = None
            if event.end is not None:
                ends.append(event.end)
                yield chunk([_delta(event.choice, {}, reason=FINISH[event.end.reason])])
        if with_usage:
            yield {**chunk([]), "usage": completion_usage(self._turns.usage(ends))}

    def _choice(self, index: int, turn: Turn) -> dict[str, Any]:
        assert turn.end is not None
        message: dict[str, Any] = {"role": "assistant", "refusal": None,
                                   "content": None if turn.calls and not turn.text else turn.text}
        if turn.reasoning:
            message["reasoning_content"] = turn.reasoning
        if turn.calls:
            message["tool_calls"] = [_call(call) for call in turn.calls]
        return {"index": index, "message": message, "finish_reason": FINISH[turn.end.reason],
                "logprobs": self._logprobs(turn.tokens) if self._body.logprobs else None}

    def _logprobs(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        return chat_logprobs(tokens, self.model.texts)


def _call(call: TurnCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _written(delta: TurnDelta) -> dict[str, Any]:
    """A ``delta`` of the API."""
    if isinstance(delta, ToolCallDelta):
        begun = {} if delta.id is None else {"id": delta.id, "type": "function"}
        name = {} if delta.name is None else {"name": delta.name}
        return {"tool_calls": [{"index": delta.index, **begun,
                                "function": {**name, "arguments": delta.arguments}}]}
    return {"reasoning_content" if isinstance(delta, ReasoningDelta) else "content": delta.text}


def _delta(index: int, delta: dict[str, Any], logprobs: dict[str, Any] | None = None,
           reason: str | None = None) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
