"""Prepares a conversation with tools for the model's chat template.

OpenAI's messages have arguments as text of JSON; templates write them by ``tojson`` and want them as values.
Some templates refuse what a client may well send: several calls in one message, ids of another length. And a
template without a place for tools gets all of it as plain text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from quantkit.structure.formats.mistral import ID_LENGTH
from quantkit.structure.turns import Tool, TurnFormat

Message = dict[str, Any]
_EXPLAINED = """You can call these functions:

{tools}

To call a function, answer with nothing but a JSON object with its name and its arguments:
{{"name": "<function>", "arguments": {{"<parameter>": <value>}}}}
To call several, answer with a JSON list of such objects. If no function helps, answer in plain text."""


def conversation(format: TurnFormat, messages: Sequence[Mapping[str, Any]],
                 tools: Sequence[Tool]) -> tuple[list[Message], list[Message] | None]:
    """What ``Tokenizer.chat`` is to be given.

    Args:
        messages: messages as in OpenAI's requests, contents as text or ``None``.
        tools: functions that the model may call.

    Returns:
        The messages, and the tools for the template: ``None`` if there are none, or the messages say it all.
    """
    prepared = [_with_values(message) for message in messages]
    if format.name == "json":
        return _explained(prepared, tools, format.variant != "user"), None
    if format.name == "llama3":
        prepared = _one_call_each(prepared)
    if format.name == "mistral":
        prepared = [_with_short_ids(message) for message in prepared]
    return prepared, [tool_message(tool) for tool in tools] or None


def tool_message(tool: Tool) -> Message:
    """A tool as in OpenAI's requests, which is what templates expect."""
    return {"type": "function", "function": {"name": tool.name, "description": tool.description,
                                             "parameters": tool.parameters or {"type": "object",
                                                                               "properties": {}}}}


def _with_values(message: Mapping[str, Any]) -> Message:
    """A message whose content is text and whose calls' arguments are values."""
    changed = dict(message)
    if changed.get("content") is None:
        changed["content"] = ""
    if not changed.get("tool_calls"):
        changed.pop("tool_calls", None)
        return changed
    changed["tool_calls"] = [{**call, "function": {**call["function"],
                                                   "arguments": _value(call["function"].get("arguments"))}}
                             for call in changed["tool_calls"]]
    return changed


def _value(arguments: Any) -> Any:
    """Arguments as a value; text that isn't an object's JSON stays text, as the model wrote it."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        value = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _one_call_each(messages: Sequence[Message]) -> list[Message]:
    """Messages of which none has more than one call, each followed by its result."""
    out: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            out.append(message)
            continue
        results = []
        while position < len(messages) and messages[position].get("role") == "tool":
            results.append(messages[position])
            position += 1
        for number, call in enumerate(calls):
            content = message["content"] if number == 0 else ""
            out.append({**message, "content": content, "tool_calls": [call]})
            answers = [result for result in results if result.get("tool_call_id") == call.get("id")]
            out += answers
            results = [result for result in results if result not in answers]
        out += results
    return out


def _with_short_ids(message: Message) -> Message:
    changed = dict(message)
    if "tool_call_id" in changed:
        changed["tool_call_id"] = _short_id(changed["tool_call_id"])
    if "tool_calls" in changed:
        changed["tool_calls"] = [{**call, "id": _short_id(call.get("id"))} for call in changed["tool_calls"]]
    return changed


def _short_id(call_id: Any) -> str:
    """An id as Mistral's templates want it: the same for the same."""
    text = str(call_id)
    if len(text) == ID_LENGTH and text.isascii() and text.isalnum():
        return text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:ID_LENGTH]


def _explained(messages: Sequence[Message], tools: Sequence[Tool], system: bool) -> list[Message]:
    """Calls, results and tools as plain text; ``system``: there may be a system message."""
    names: dict[str, str] = {}
    out: list[Message] = []
    for message in messages:
        if message.get("role") == "tool":
            name = names.get(str(message.get("tool_call_id")), "")
            text = f"Result of {name or 'the function'}:\n{message['content']}"
            if out and out[-1].get("results"):
                out[-1]["content"] += "\n\n" + text
            else:
                out.append({"role": "user", "content": text, "results": True})
            continue
        if message.get("role") == "user" and out and out[-1].get("results"):  # roles must often alternate
            out[-1]["content"] += "\n\n" + message["content"]
            continue
        changed = {key: value for key, value in message.items() if key != "tool_calls"}
        if calls := message.get("tool_calls"):
            names |= {str(call.get("id")): call["function"]["name"] for call in calls}
            written = [json.dumps({"name": call["function"]["name"],
                                   "arguments": call["function"]["arguments"]}, ensure_ascii=False)
                       for call in calls]
            text = written[0] if len(written) == 1 else "[" + ", ".join(written) + "]"
            changed["content"] = "\n".join(filter(None, (message["content"], text)))
        out.append(changed)
    for message in out:
        message.pop("results", None)
    if tools:
        text = _EXPLAINED.format(tools="\n".join(
            json.dumps(tool_message(tool)["function"], ensure_ascii=False) for tool in tools))
        first = "system" if system else "user"
        if out and out[0].get("role") == first:
            text = "\n\n".join(filter(None, (text, out.pop(0)["content"]) if first == "user" else
                                      (out.pop(0)["content"], text)))
        out.insert(0, {"role": first, "content": text})
    return out
