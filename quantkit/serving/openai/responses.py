"""``/v1/responses``: https://platform.openai.com/docs/api-reference/responses/object."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from quantkit.serving.errors import ApiError
from quantkit.serving.ignored import leave_out
from quantkit.serving.models import ServedEngine
from quantkit.serving.openai.response_events import ResponseEvents, new_id, output_item
from quantkit.serving.openai.response_tools import ClientTool, NotRegularError, given_tools
from quantkit.serving.openai.responses_request import ResponsesRequest
from quantkit.serving.openai.usage import response_usage
from quantkit.serving.reply import Reply
from quantkit.serving.turns import NextTurn, TurnEnd
from quantkit.serving.work import RequestWork
from quantkit.structure.turns import Tool


class ResponsesReply(Reply):
    """A response. Raises what :class:`NextTurn` does."""

    event_names = True
    ends_with_done = False

    def __init__(self, model: ServedEngine, body: ResponsesRequest) -> None:
        self.model, self.stream, self._body = model, body.stream, body
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
        """The complete response."""
        (turn,) = await self._turns.whole(work)
        assert turn.end is not None
        status = _status(turn.end)
        # all but the last item are complete, however the turn ended
        states = ["completed"] * (len(turn.parts) - 1) + [status]
        items = [output_item(part, new_id(part), state, self._tools)
                 for part, state in zip(turn.parts, states)]
        return self._response(status, items, turn.end)

    async def events(self, work: RequestWork) -> AsyncIterator[dict[str, Any]]:
        """Events, each with its number."""
        events = self._events
        yield events.event("response.created", response=self._response("in_progress", []))
        yield events.event("response.in_progress", response=self._response("in_progress", []))
        async for event in self._turns.events(work):
            for delta in event.deltas:
                for made in events.delta(delta):
                    yield made
            if event.end is not None:
                status = _status(event.end)
                for made in events.close(status):
                    yield made
                yield events.event(f"response.{status}",
                                   response=self._response(status, events.items, event.end))

    def keep_alive(self) -> dict[str, Any]:
        """``response.in_progress`` once more."""
        return self._events.event("response.in_progress", response=self._response("in_progress", []))

    def error(self, error: ApiError) -> dict[str, Any]:
        """``error``."""
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


def _status(end: TurnEnd) -> str:
    return "incomplete" if end.reason == "length" else "completed"
