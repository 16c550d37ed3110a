"""The events of a streamed response, in their order: each item is added, filled, and done before the next."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

from quantkit.serve.turns import TurnCall
from quantkit.structure.base import ReasoningDelta, TextDelta, ToolCallDelta, TurnDelta

Part = TextDelta | ReasoningDelta | TurnCall


class ResponseEvents:
    """Makes events of deltas.

    Attributes:
        items: of the output, those that are complete.
    """

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._number = 0
        self._open: Part | None = None
        self._id = ""

    def event(self, kind: str, **values: Any) -> dict[str, Any]:
        """The next event."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def delta(self, delta: TurnDelta) -> Iterator[dict[str, Any]]:
        """What a delta is in events; the item before it ends if it is of another kind."""
        begins = type(self._open) is not type(delta)
        if isinstance(delta, ToolCallDelta):
            begins = delta.id is not None
        if begins:
            yield from self.close("completed")
            yield from self._begin(delta)
        if isinstance(delta, ToolCallDelta):
            assert isinstance(self._open, TurnCall)
            if delta.arguments:
                self._open.arguments += delta.arguments
                yield self._in_item("response.function_call_arguments.delta", delta=delta.arguments)
        elif isinstance(delta, TextDelta):
            self._open = TextDelta(self._text + delta.text)
            yield self._in_item("response.output_text.delta", content_index=0, delta=delta.text, logprobs=[])
        else:
            self._open = ReasoningDelta(self._text + delta.text)
            yield self._in_item("response.reasoning_text.delta", content_index=0, delta=delta.text)

    def close(self, status: str) -> Iterator[dict[str, Any]]:
        """The end of the item that is open, if there is one."""
        part = self._open
        if part is None:
            return
        if isinstance(part, TurnCall):
            yield self._in_item("response.function_call_arguments.done", arguments=part.arguments,
                                name=part.name)
        else:
            if isinstance(part, TextDelta):
                yield self._in_item("response.output_text.done", content_index=0, text=part.text, logprobs=[])
            else:
                yield self._in_item("response.reasoning_text.done", content_index=0, text=part.text)
            yield self._in_item("response.content_part.done", content_index=0, part=content_part(part))
        item = output_item(part, self._id, status)
        yield self.event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._open = None

    @property
    def _text(self) -> str:
        return "" if self._open is None or isinstance(self._open, TurnCall) else self._open.text

    def _begin(self, delta: TurnDelta) -> Iterator[dict[str, Any]]:
        if isinstance(delta, ToolCallDelta):
            self._open = TurnCall(delta.id or "", delta.name or "")
        else:
            self._open = type(delta)("")
        self._id = new_id(self._open)
        item = output_item(self._open, self._id, "in_progress")
        yield self.event("response.output_item.added", output_index=len(self.items), item=item)
        if not isinstance(self._open, TurnCall):
            yield self._in_item("response.content_part.added", content_index=0, part=content_part(self._open))

    def _in_item(self, kind: str, **values: Any) -> dict[str, Any]:
        return self.event(kind, item_id=self._id, output_index=len(self.items), **values)


def new_id(part: Part) -> str:
    """Of an item of the output."""
    kind = "fc" if isinstance(part, TurnCall) else "rs" if isinstance(part, ReasoningDelta) else "msg"
    return f"{kind}_{uuid.uuid4().hex}"


def content_part(part: TextDelta | ReasoningDelta) -> dict[str, Any]:
    """The one part that an item of text or reasoning has."""
    if isinstance(part, ReasoningDelta):
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def output_item(part: Part, item_id: str, status: str) -> dict[str, Any]:
    """A part of a turn as an item of the output; one in progress has no content yet."""
    if isinstance(part, TurnCall):
        return {"type": "function_call", "id": item_id, "call_id": part.id, "name": part.name,
                "arguments": part.arguments, "status": status}
    content = [] if status == "in_progress" else [content_part(part)]
    if isinstance(part, ReasoningDelta):
        return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}
    return {"type": "message", "id": item_id, "role": "assistant", "content": content, "status": status}
