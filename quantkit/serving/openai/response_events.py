"""The events of a streamed response, in their order: each item is added, filled, and done before the next."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from quantkit.serving.openai.response_tools import ClientTool, InputText, input_text
from quantkit.serving.turns import TurnCall
from quantkit.structure.base import ReasoningDelta, TextDelta, ToolCallDelta, TurnDelta
from quantkit.structure.turns import Tool

Part = TextDelta | ReasoningDelta | TurnCall


class ResponseEvents:
    """Makes events of deltas.

    Args:
        tools: the client's, by the names that the model sees.

    Attributes:
        items: of the output, those that are complete.
    """

    def __init__(self, tools: Mapping[str, ClientTool]) -> None:
        self.items: list[dict[str, Any]] = []
        self._tools = tools
        self._input: InputText | None = None  # of the custom tool's call that is open
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
                if self._input is None:
                    yield self._in_item("response.function_call_arguments.delta", delta=delta.arguments)
                elif text := self._input.push(delta.arguments):
                    yield self._in_item("response.custom_tool_call_input.delta", delta=text)
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
        if self._input is not None:
            if rest := self._input.finish():
                yield self._in_item("response.custom_tool_call_input.delta", delta=rest)
            yield self._in_item("response.custom_tool_call_input.done", input=self._input.text)
        elif isinstance(part, TurnCall):
            yield self._in_item("response.function_call_arguments.done", arguments=part.arguments,
                                name=called(part, self._tools).name)
        else:
            if isinstance(part, TextDelta):
                yield self._in_item("response.output_text.done", content_index=0, text=part.text, logprobs=[])
            else:
                yield self._in_item("response.reasoning_text.done", content_index=0, text=part.text)
            yield self._in_item("response.content_part.done", content_index=0, part=content_part(part))
        item = output_item(part, self._id, status, self._tools)
        yield self.event("response.output_item.done", output_index=len(self.items), item=item)
        self.items.append(item)
        self._open = self._input = None

    @property
    def _text(self) -> str:
        return "" if self._open is None or isinstance(self._open, TurnCall) else self._open.text

    def _begin(self, delta: TurnDelta) -> Iterator[dict[str, Any]]:
        if isinstance(delta, ToolCallDelta):
            self._open = TurnCall(delta.id or "", delta.name or "")
            if called(self._open, self._tools).custom:
                self._input = InputText()
        else:
            self._open = type(delta)("")
        self._id = new_id(self._open)
        item = output_item(self._open, self._id, "in_progress", self._tools)
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


def called(call: TurnCall, tools: Mapping[str, ClientTool]) -> ClientTool:
    """The client's tool that a call is for."""
    return tools.get(call.name) or ClientTool(Tool(call.name), call.name)


def output_item(part: Part, item_id: str, status: str, tools: Mapping[str, ClientTool]) -> dict[str, Any]:
    """A part of a turn as an item of the output; one in progress has no content yet."""
    if isinstance(part, TurnCall):
        tool = called(part, tools)
        namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
        item = {"id": item_id, "call_id": part.id, "name": tool.name, **namespace, "status": status}
        if tool.custom:
            return {"type": "custom_tool_call", **item, "input": input_text(part.arguments)}
        return {"type": "function_call", **item, "arguments": part.arguments}
    content = [] if status == "in_progress" else [content_part(part)]
    if isinstance(part, ReasoningDelta):
        return {"type": "reasoning", "id": item_id, "summary": [], "content": content, "status": status}
    return {"type": "message", "id": item_id, "role": "assistant", "content": content, "status": status}
