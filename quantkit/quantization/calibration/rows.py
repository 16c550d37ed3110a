"""Turns one row of a data set into a document: a text or a conversation, in the usual forms of data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.support.errors import CalibrationError

_ROLES = {"human": "user", "prompter": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant",
          "model": "assistant"}
"""Who speaks, in ShareGPT's words and others, where it isn't called so already."""
_ANSWERS = ("response", "completion", "output", "answer")
KEYS = frozenset({"text", "messages", "conversations", "conversation", "prompt", "instruction", "question",
                  "input", "context", "tools", *_ANSWERS})
"""Of a row, what is looked at."""
FORMS = ("text; messages [{role, content}]; conversations [{from, value}]; prompt with response or "
         "completion; instruction with output")


@dataclass(frozen=True)
class Document:
    """A text or a conversation, and where it was found.

    Attributes:
        where: file and line.
        content: the text; or OpenAI's messages, each with ``role`` and ``content``, which is text, and with
            ``tool_calls``, ``tool_call_id``, ``name`` and ``reasoning_content`` where the row has them.
        tools: OpenAI's functions that may be called in the conversation: ``name``, ``description`` and
            ``parameters`` each.
    """

    where: str
    content: str | tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @property
    def is_chat(self) -> bool:
        """Whether a chat template has to write it."""
        return not isinstance(self.content, str)


def parse_row(line: bytes, where: str) -> Document | None:
    """A line of a JSONL file, ``None`` if it holds an empty text.

    Raises:
        CalibrationError: it is no JSON object in UTF-8, or of no known form; ``where`` is named.
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{where} is not UTF-8", why=f"byte {error.start}: {error.reason}",
                               next="convert the file") from None
    except (ValueError, RecursionError) as error:
        raise CalibrationError(f"{where} is not JSON", why=str(error)[:200],
                               next="correct or remove that line: a file holds an object a line, or is one "
                                    "JSON array of objects") from None
    return parse_value(row, where)


def parse_value(row: Any, where: str) -> Document | None:
    """The document in a JSON value, ``None`` if its text is empty. Raises CalibrationError if it has none."""
    if isinstance(row, list):
        raise CalibrationError(f"{where} is a JSON array", why="a JSONL file holds one object a line",
                               next="jq -c '.[]' FILE > FILE.jsonl")
    if not isinstance(row, dict):
        raise CalibrationError(f"{where} is a {type(row).__name__}, not a JSON object",
                               next=f"known: {FORMS}")
    return document(row, where)


def document(row: Mapping[str, Any], where: str) -> Document | None:
    """The document in a row, ``None`` if its text is empty.

    Raises:
        CalibrationError: the row is of no known form, a text isn't one, or nobody asks in the conversation.
    """
    turns_of_row = _turns(row, where)
    if turns_of_row is None:
        if "text" not in row:
            raise CalibrationError(f"{where} is of no known form", next=f"known: {FORMS}",
                                   why=f"its keys: {', '.join(map(repr, row))[:200] or 'none'}")
        text = _text(row["text"], where, "text")
        return Document(where, text) if text.strip() else None
    turns = tuple(turns_of_row)
    if not any(turn["role"] == "user" and turn["content"].strip() for turn in turns):
        raise CalibrationError(f"{where} is a conversation without a user's turn",
                               why=f"roles: {', '.join(turn['role'] for turn in turns) or 'none'}",
                               next="correct or remove that line; for plain text the key is 'text'")
    return Document(where, turns, _tools(row.get("tools"), where))


def _turns(row: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    """The messages; ``None`` where the row is no conversation."""
    for key, role, content in (("messages", "role", "content"), ("conversations", "from", "value"),
                               ("conversation", "role", "content")):
        if row.get(key) is not None:
            return _listed(row[key], where, key, role, content)
    question = next((key for key in ("prompt", "instruction", "question") if row.get(key) is not None), None)
    if question is None:
        return None
    answer = next((key for key in _ANSWERS if row.get(key) is not None), None)
    if answer is None and isinstance(row.get("text"), str) and not isinstance(row[question], list):
        return None  # what was asked for is the text
    if isinstance(row[question], list):  # a prompt may be a conversation itself, and so may its completion
        turns = _listed(row[question], where, question, "role", "content")
        if answer is not None and isinstance(row[answer], list):
            return turns + _listed(row[answer], where, answer, "role", "content")
    else:
        more = [_text(row[key], where, key) for key in ("input", "context") if row.get(key)]
        turns = [{"role": "user", "content": "\n\n".join(
            [_text(row[question], where, question), *filter(str.strip, more)])}]
    return turns if answer is None else [
        *turns, {"role": "assistant", "content": _text(row[answer], where, answer)}]


def _listed(value: Any, where: str, key: str, role: str, content: str) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise CalibrationError(f"{where}: {key!r} is not a list of turns", next=f"known: {FORMS}")
    turns = []
    for number, turn in enumerate(value, 1):
        at = f"{where}, turn {number} of {key!r}"
        if isinstance(turn, Mapping) and role not in turn:  # each is seen under both names
            role, content = ("role", "content") if role == "from" else ("from", "value")
        calls = (turn.get("tool_calls") or []) if isinstance(turn, Mapping) else []
        if not isinstance(turn, Mapping) or role not in turn or not (content in turn or calls):
            raise CalibrationError(f"{at} has no {role!r} and {content!r}", next=f"known: {FORMS}")
        who = turn[role]
        if not isinstance(who, str) or not who.strip():  # content parts are for contents alone
            raise CalibrationError(f"{at}: {role!r} is not the name of a role", why=f"it is {who!r:.200}",
                                   next="correct or remove that line")
        text = "" if calls and turn.get(content) is None else _text(turn[content], at, content)
        message: dict[str, Any] = {"role": _ROLES.get(who, _text(who, at, role)), "content": text}
        if calls:
            message["tool_calls"] = _calls(calls, at)
        more = {"tool": ("tool_call_id", "name"), "assistant": ("reasoning_content",)}
        turns.append(message | {name: _text(turn[name], at, name) for name in more.get(message["role"], ())
                                if turn.get(name) is not None})
    return turns


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """An assistant's ``tool_calls``, as OpenAI writes them; arguments may be values too."""
    functions: list[Any] = [call.get("function") if isinstance(call, Mapping) else None
                            for call in calls] if isinstance(calls, list) else [None]
    if not all(isinstance(function, Mapping) and isinstance(function.get("name"), str)
               and isinstance(function.get("arguments", ""), str | Mapping) for function in functions):
        raise CalibrationError(f"{where}: 'tool_calls' are not a list of calls of functions",
                               why="each has a function with a name, and arguments as an object or its JSON",
                               next="correct or remove that line")
    return [{"id": call.get("id"), "type": "function", "function": {
        "name": function["name"], "arguments": function.get("arguments", "")}}
        for call, function in zip(calls, functions, strict=True)]


def _tools(tools: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """A row's ``tools``: OpenAI's, the functions themselves, or the JSON text of either."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            tools = [None]
    listed = tools if isinstance(tools, list) else [] if tools is None else [None]
    functions: tuple[Any, ...] = tuple(
        tool.get("function", tool) if isinstance(tool, Mapping) else None for tool in listed)
    if not all(isinstance(function, Mapping) and isinstance(function.get("name"), str)
               and isinstance(function.get("description") or "", str)
               and isinstance(function.get("parameters") or {}, Mapping) for function in functions):
        raise CalibrationError(f"{where}: 'tools' is not a list of functions",
                               why="each has a name, and may have a description and parameters",
                               next="correct or remove that line")
    return functions


def _text(value: Any, where: str, key: str) -> str:
    if isinstance(value, list) and all(isinstance(part, Mapping) and isinstance(part.get("text"), str)
                                       for part in value):
        value = "".join(part["text"] for part in value)  # OpenAI's content parts
    if not isinstance(value, str):
        raise CalibrationError(f"{where}: {key!r} is not text but a {type(value).__name__}",
                               next="correct or remove it")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise CalibrationError(f"{where}: {key!r} holds half a character", why=str(error)[:200],
                               next="correct or remove it") from None
    return value
