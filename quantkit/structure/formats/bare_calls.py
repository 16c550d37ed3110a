"""Calls as plain JSON from models that were taught another notation.

Small models forget the marks of their notation and write a call as a message that is JSON and nothing else,
perhaps in a fence of Markdown. Such a message is a call if it names a tool and fits its schema.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from quantkit.structure.base import ReasoningDelta, TextDelta, ToolCallDelta, TurnDelta
from quantkit.structure.formats.json_call import ARGUMENTS, decoded, read_json
from quantkit.structure.formats.scanner import MAX_HEAD, MAX_SPACE, TurnScanner
from quantkit.structure.json_scanner import JsonScanner
from quantkit.structure.schemas import arguments_schema

_KEYS = frozenset({"name", "function", "type", "id", *ARGUMENTS})
_TYPES = ("function", "function_call", "tool_call", "tool_use")
_FENCE = "```"
_BEGIN = re.compile(r"(```(json\b)?\s*)?")
_MESSAGE = re.compile(r"\s*(?:```(?:json\b)?)?\s*([\[{].*[\]}])\s*(?:```)?\s*", re.DOTALL)
MAX_SECONDS = 0.1
"""Of processor time for all calls of a message; usual ones take a hundredth of it. The number of rules that
are applied says too little: a single one may compare a large value with many others."""
_Check = Callable[[Any, Any, Any, Any], Any]


class _Tool(Protocol):
    """What is needed of a tool."""

    @property
    def name(self) -> str: ...

    @property
    def parameters(self) -> dict[str, Any]: ...


class BareCalls:
    """Reads calls in a notation, and messages that are calls as plain JSON.

    Text is held back while the whole message can still be such a call: one that begins with anything but
    ``{``, ``[`` or a fence isn't.

    Args:
        inner: the parser of the notation.
        tools: the tools that can be called.
    """

    def __init__(self, inner: TurnScanner, tools: Sequence[_Tool]) -> None:
        self._inner, self._tools = inner, {tool.name: tool for tool in tools}
        self._held: list[str] = []
        self._message: _Message | None = _Message(frozenset(self._tools))

    def push(self, text: str) -> list[TurnDelta]:
        return self._passed(self._inner.push(text))

    def finish(self) -> list[TurnDelta]:
        deltas = self._passed(self._inner.finish())
        if self._message is None or not self._held:
            return deltas
        calls = self._calls("".join(self._held)) if self._message.complete else []
        for number, (name, arguments) in enumerate(calls):
            deltas.append(ToolCallDelta(number, arguments, id=self._inner.new_call_id(), name=name))
        return deltas if calls else [*deltas, *self._released()]

    def _passed(self, deltas: Sequence[TurnDelta]) -> list[TurnDelta]:
        """What is certain of what the inner parser says."""
        out: list[TurnDelta] = []
        for delta in deltas:
            if self._message is None or isinstance(delta, ReasoningDelta):
                out.append(delta)
            elif isinstance(delta, TextDelta):
                self._held.append(delta.text)
                if not all(map(self._message.feed, delta.text)):
                    out += self._released()
            else:
                out += [*self._released(), delta]
        return out

    def _released(self) -> list[TurnDelta]:
        """What was held back, now that it is text. From now on all text is."""
        text = "".join(self._held)
        self._held = []
        self._message = None
        return [TextDelta(text)] if text else []

    def _calls(self, text: str) -> list[tuple[str, str]]:
        """Names and arguments of the calls that a message consists of; none if it is anything else."""
        message = _MESSAGE.fullmatch(text)
        value = None if message is None else read_json(message[1])
        calls: list[tuple[_Tool, dict[str, Any]]] = []
        for item in value if isinstance(value, list) else [value]:
            if (call := self._call(item)) is None:
                return []
            calls.append(call)
        if not fit([(arguments, arguments_schema(tool.parameters)) for tool, arguments in calls]):
            return []
        # all ASCII: there may be halves of surrogate pairs in it
        return [(tool.name, json.dumps(arguments)) for tool, arguments in calls]

    def _call(self, value: Any) -> tuple[_Tool, dict[str, Any]] | None:
        """The tool and the arguments of what may be a call."""
        if not isinstance(value, dict) or value.get("type", _TYPES[0]) not in _TYPES:
            return None
        call = value.get("function", value)
        keys = set(call) - {"name", "type", "id"} if isinstance(call, dict) else set()
        if len(keys) != 1 or not keys <= set(ARGUMENTS) or (call is not value and not value.keys() <= {
                "function", "type", "id"}):
            return None
        name, arguments = call.get("name"), call[keys.pop()]
        if isinstance(arguments, str):
            arguments = read_json(arguments)
        tool = self._tools.get(name) if isinstance(name, str) else None
        return None if tool is None or not isinstance(arguments, dict) else (tool, arguments)


class _Message:
    """Reads a message one character at a time, and tells whether it can still be nothing but calls.

    Attributes:
        complete: whether it is, should nothing follow.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self.complete = False
        self._names, self._size = names, 0
        self._begin = self._end = ""  # the fence so far
        self._listed, self._object = False, JsonScanner()
        self._state: Callable[[str], bool] = self._before

    def feed(self, char: str) -> bool:
        """Read a character; returns whether the message can still be calls."""
        self._size += 1
        return self._size <= MAX_HEAD and self._state(char)

    def _before(self, char: str) -> bool:
        if char in "[{" and _BEGIN.fullmatch(self._begin):
            self._listed, self._state = char == "[", self._item
            return self._listed or self._item(char)
        self._begin = (self._begin + char).lstrip()
        return self._size <= MAX_SPACE and bool(
            _BEGIN.fullmatch(self._begin) or f"{_FENCE}json".startswith(self._begin))

    def _item(self, char: str) -> bool:
        """Where an object must begin."""
        if char == "{":
            self._object, self._state = JsonScanner(), self._inside
            return self._object.feed(char)
        return char.isspace()

    def _inside(self, char: str) -> bool:
        read = self._object
        if not read.feed(char):
            return False
        if read.done:
            self.complete = not self._listed
            self._state = self._between if self._listed else self._behind
        elif read.depth == 1:
            if read.key and read.key not in _KEYS:
                return False
            if read.ended_value and read.key == "name":
                return decoded(read.string) in self._names
        return True

    def _between(self, char: str) -> bool:
        """Behind an object of a list."""
        if char == ",":
            self._state = self._item
        elif char == "]":
            self.complete, self._state = True, self._behind
        return char in ",]" or char.isspace()

    def _behind(self, char: str) -> bool:
        """Behind all calls, where the fence may end."""
        if char.isspace():
            return self._end in ("", _FENCE)
        self._end += char
        return bool(self._begin) and _FENCE.startswith(self._end)


def fit(calls: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> bool:
    """Whether the arguments of each call of a message fit the JSON schema beside them.

    Regular expressions (``pattern``, ``patternProperties``) and formats aren't checked: Python's matcher can
    take hours for an expression that a stranger wrote. What is checked only for keys that nothing else names
    (``unevaluatedProperties``) isn't checked either.

    Returns:
        Whether all fit; ``False`` also if a schema is malformed, or it takes more than :data:`MAX_SECONDS`.
    """
    from jsonschema import Draft202012Validator, ValidationError, validators
    from referencing import Registry

    def bounded(check: _Check) -> _Check:
        def run(validator: Any, rule: Any, instance: Any, schema: Any) -> Any:
            if time.thread_time() > until:
                raise _TimeUpError
            return check(validator, rule, instance, schema) or ()

        return run

    def additional(validator: Any, rule: Any, instance: Any, schema: Any) -> Any:
        return () if "patternProperties" in schema else known["additionalProperties"](
            validator, rule, instance, schema)

    def unique(validator: Any, rule: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
        if rule and isinstance(instance, list) and len(
                {json.dumps(item, sort_keys=True) for item in instance}) < len(instance):
            yield ValidationError("two items are the same")

    known = Draft202012Validator.VALIDATORS
    left_out = {"pattern", "patternProperties", "format", "unevaluatedItems", "unevaluatedProperties",
                "$dynamicRef"}
    checks = {name: check for name, check in known.items() if name not in left_out}
    checks |= {"additionalProperties": additional, "uniqueItems": unique}
    kind = validators.create({}, {name: bounded(check) for name, check in checks.items()},
                             type_checker=Draft202012Validator.TYPE_CHECKER)
    until = time.thread_time() + MAX_SECONDS
    try:
        for arguments, schema in calls:
            # a part with a $schema would be checked by other rules than these
            plain = json.loads(json.dumps(schema), object_hook=_without_identity)
            if time.thread_time() > until or not kind(plain, registry=Registry()).is_valid(arguments):
                return False  # the registry fetches nothing
        return True
    except Exception:  # of any of the library's rules, over a schema that is malformed
        return False


class _TimeUpError(Exception):
    pass


def _without_identity(part: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in part.items()
            if not (key in ("$schema", "$id") and isinstance(value, str))}
