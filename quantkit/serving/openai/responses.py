"""``/v1/responses``: https://platform.openai.com/docs/api-reference/responses/object."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from quantkit.serving.errors import ApiError
from quantkit.serving.ignored import leave_out
from quantkit.serving.models import ServedEngine
from quantkit.serving.openai.response_tools import (
    ClientTool,
    InputText,
    NotRegularError,
    given_tools,
    input_text,
)
from quantkit.serving.openai.responses_request import ResponsesRequest
from quantkit.serving.reply import Reply
from quantkit.serving.turns import NextTurn, TurnCall, TurnEnd, TurnPart, TurnUsage, begins_part, empty_part
from quantkit.serving.work import RequestWork
from quantkit.structure.base import ReasoningDelta, TextDelta, ToolCallDelta, TurnDelta
from quantkit.structure.turns import Tool


class ResponseEvents:
    """Makes events of deltas.

    Args:
        tools: The client's tools by the names that the model sees.

    Attributes:
        items: The items of the output that are complete.
    """

    def __init__(self, tools: Mapping[str, ClientTool]) -> None:
        self.items: list[dict[str, Any]] = []
        self._tools = tools
        self._input: InputText | None = None  # of the custom tool's call that is open
        self._number = 0
        self._open: TurnPart | None = None
        self._id = ""

    def event(self, kind: str, **values: Any) -> dict[str, Any]:
        """The next event."""
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **values}

    def delta(self, delta: TurnDelta) -> Iterator[dict[str, Any]]:
        """What a delta is in events; the item before it ends if it is of another kind."""
        if begins_part(delta, self._open):
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
        self._open = empty_part(delta)
        if isinstance(self._open, TurnCall) and called(self._open, self._tools).custom:
            self._input = InputText()
        kinds = {TurnCall: "fc", ReasoningDelta: "rs", TextDelta: "msg"}
        self._id = f"{kinds[type(self._open)]}_{uuid.uuid4().hex}"
        item = output_item(self._open, self._id, "in_progress", self._tools)
        yield self.event("response.output_item.added", output_index=len(self.items), item=item)
        if not isinstance(self._open, TurnCall):
            yield self._in_item("response.content_part.added", content_index=0, part=content_part(self._open))

    def _in_item(self, kind: str, **values: Any) -> dict[str, Any]:
        return self.event(kind, item_id=self._id, output_index=len(self.items), **values)


def content_part(part: TextDelta | ReasoningDelta) -> dict[str, Any]:
    """The one part that an item of text or reasoning has."""
    if isinstance(part, ReasoningDelta):
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


def called(call: TurnCall, tools: Mapping[str, ClientTool]) -> ClientTool:
    """The client's tool that a call is for."""
    return tools.get(call.name) or ClientTool(Tool(call.name), call.name)


def output_item(part: TurnPart, item_id: str, status: str, tools: Mapping[str, ClientTool]) -> dict[str, Any]:
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


class ResponsesReply(Reply):
    """A response. Raises what :class:`NextTurn` does."""

    event_names = True
    ends_with_done = False

    def __init__(self, model: ServedEngine, body: ResponsesRequest) -> None:
        self.model = model
        self.stream = body.stream
        self._body = body
        self._turns = NextTurn(model, body.conversation())
        self.jobs = self._turns.jobs
        self.id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._tools = {tool.tool.name: tool for tool in body.client_tools()}
        self._grammars: list[ClientTool] = []  # tools whose grammars are part of the structure
        tools = [self._tool(tool) for tool in self._tools.values()]
        self.structure = self._turns.structure_of_turn(body.structure(tools))
        self._events = ResponseEvents(self._tools)

    def compile(self) -> None:
        """A grammar of a tool that can't be kept is left out."""
        try:
            super().compile()
        except ApiError as error:
            if not self._grammars:
                raise
            for tool in self._grammars:
                leave_out(f"{tool.place}.format", error.detail)
            self._grammars = []
            self.structure = self._turns.structure
            super().compile()

    def _tool(self, tool: ClientTool) -> Tool:
        try:
            constrained = tool.constrained()
        except NotRegularError as error:
            leave_out(f"{tool.place}.format", f"the grammar can't be kept: {error}")
            return tool.tool
        if constrained is not tool.tool:
            self._grammars.append(tool)
        return constrained

    async def body(self, work: RequestWork) -> dict[str, Any]:
        last: dict[str, Any] = {}
        async for event in self.events(work):
            last = event
        response: dict[str, Any] = last["response"]  # the last event has all of it
        return response

    async def events(self, work: RequestWork) -> AsyncIterator[dict[str, Any]]:
        """Events, each with its number."""
        events = self._events
        yield events.event("response.created", response=self._response("in_progress", []))
        yield events.event("response.in_progress", response=self._response("in_progress", []))
        async for event in self._turns.events(work):
            for delta in event.deltas:
                for item in events.delta(delta):
                    yield item
            if event.end is not None:
                status = "incomplete" if event.end.reason == "length" else "completed"
                for item in events.close(status):
                    yield item
                yield events.event(f"response.{status}",
                                   response=self._response(status, events.items, event.end))

    def keep_alive(self) -> dict[str, Any]:
        """``response.in_progress`` once more."""
        return self._events.event("response.in_progress", response=self._response("in_progress", []))

    def error(self, error: ApiError) -> dict[str, Any]:
        return self._events.event("error", code=error.code, message=error.detail, param=error.param)

    def _response(self, status: str, output: list[dict[str, Any]],
                  end: TurnEnd | None = None) -> dict[str, Any]:
        body = self._body
        choice = body.tool_choice
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self.id, "object": "response", "created_at": self._created, "status": status,
            "model": self.model.name, "output": output, "error": None, "incomplete_details": cut,
            "instructions": body.instructions, "metadata": body.metadata, "temperature": body.temperature,
            "top_p": body.top_p, "max_output_tokens": body.max_output_tokens, "background": False,
            "previous_response_id": None, "store": False, "truncation": "disabled",
            "parallel_tool_calls": body.parallel_tool_calls,
            "tool_choice": choice if isinstance(choice, str) else {"type": choice.type, "name": choice.name},
            "tools": given_tools(body.tools),
            "text": {"format": body.text.format.model_dump(by_alias=True)},
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "usage": None if end is None else response_usage(self._turns.usage([end])),
        }


def response_usage(usage: TurnUsage) -> dict[str, Any]:
    return {"input_tokens": usage.prompt, "output_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": usage.reasoning}}
