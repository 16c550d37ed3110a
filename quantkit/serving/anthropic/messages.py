"""``/v1/messages``: https://docs.anthropic.com/en/api/messages-streaming."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from typing import Any

from quantkit.serving.anthropic.request import CountRequest, MessagesRequest
from quantkit.serving.errors import ApiError
from quantkit.serving.models import ServedEngine
from quantkit.serving.reply import Reply
from quantkit.serving.turns import (
    NextTurn,
    TurnCall,
    TurnEnd,
    TurnPart,
    TurnUsage,
    begins_part,
    empty_part,
    render,
)
from quantkit.serving.work import RequestWork
from quantkit.structure.base import ReasoningDelta, ToolCallDelta, TurnDelta
from quantkit.support.errors import SourceError
from quantkit.support.strict_json import parse_object

STOP = {"stop": "end_turn", "stop_string": "stop_sequence", "length": "max_tokens", "tool_calls": "tool_use"}
"""Why a turn ended, in Anthropic's words."""


def count_tokens(model: ServedEngine, body: CountRequest) -> dict[str, int]:
    """The answer of ``/v1/messages/count_tokens``. Raises what :func:`render` does."""
    return {"input_tokens": len(render(model, body.conversation()))}


class MessagesReply(Reply):
    """A message. Raises what :class:`NextTurn` does."""

    event_names = True
    ends_with_done = False

    def __init__(self, model: ServedEngine, body: MessagesRequest) -> None:
        self.model, self.stream = model, body.stream
        self._turns = NextTurn(model, body.conversation())
        self.jobs, self.structure = self._turns.jobs, self._turns.structure
        self.id = f"msg_{uuid.uuid4().hex}"

    async def body(self, work: RequestWork) -> dict[str, Any]:
        """``message``."""
        (turn,) = await self._turns.whole(work)
        return self._message([_block(part) for part in turn.parts], turn.end)

    async def events(self, work: RequestWork) -> AsyncIterator[dict[str, Any]]:
        """From ``message_start`` to ``message_stop``."""
        yield {"type": "message_start", "message": self._message([], None)}
        index = -1
        part: TurnPart | None = None  # the block that is open
        async for event in self._turns.events(work):
            for delta in event.deltas:
                if begins_part(delta, part):
                    if index >= 0:
                        yield {"type": "content_block_stop", "index": index}
                    index += 1
                    part = empty_part(delta)
                    yield {"type": "content_block_start", "index": index, "content_block": _block(part)}
                if (change := _change(delta)) is not None:
                    yield {"type": "content_block_delta", "index": index, "delta": change}
            if event.end is not None:
                if index >= 0:
                    yield {"type": "content_block_stop", "index": index}
                message = self._message([], event.end)
                yield {"type": "message_delta", "usage": message["usage"],
                       "delta": {key: message[key] for key in ("stop_reason", "stop_sequence")}}
        yield {"type": "message_stop"}

    def keep_alive(self) -> dict[str, Any]:
        """``ping``."""
        return {"type": "ping"}

    def error(self, error: ApiError) -> dict[str, Any]:
        return error.anthropic_body()

    def _message(self, content: list[dict[str, Any]], end: TurnEnd | None) -> dict[str, Any]:
        usage = self._turns.usage([end])
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model.name,
                "content": content, "stop_reason": None if end is None else STOP[end.reason],
                "stop_sequence": None if end is None else end.stop, "usage": _usage(usage)}


def _usage(usage: TurnUsage) -> dict[str, int]:
    # there, input tokens are those that no cache had
    return {"input_tokens": usage.prompt - usage.cached, "cache_read_input_tokens": usage.cached,
            "cache_creation_input_tokens": 0, "output_tokens": usage.completion}


def _block(part: TurnPart) -> dict[str, Any]:
    if isinstance(part, TurnCall):
        return {"type": "tool_use", "id": part.id, "name": part.name, "input": _input(part.arguments)}
    if isinstance(part, ReasoningDelta):
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    return {"type": "text", "text": part.text}


def _input(arguments: str) -> dict[str, Any]:
    """Arguments as the object that they should be; a turn that was cut may have less."""
    try:
        return parse_object((arguments or "{}").encode(), "arguments", next="ask for more tokens")
    except SourceError:
        return {}


def _change(delta: TurnDelta) -> dict[str, Any] | None:
    if isinstance(delta, ToolCallDelta):
        return {"type": "input_json_delta", "partial_json": delta.arguments} if delta.arguments else None
    if isinstance(delta, ReasoningDelta):
        return {"type": "thinking_delta", "thinking": delta.text}
    return {"type": "text_delta", "text": delta.text}
