"""A tool's arguments in Gemma's notation, as rules of a grammar."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping
from typing import Any

from quantkit.structure.schemas import Fault, Path, children

_KNOWN = frozenset({"type", "properties", "required", "additionalProperties", "items", "minItems",
                    "maxItems", "enum", "const",
                    "anyOf", "title", "description", "default", "examples", "nullable", "$schema",
                    "$comment"})
_MAX_ITEMS = 256
_ANY = r"/[^<{}\[\],]{1,200}/"
_NUMBERS = {"integer": "/-?(0|[1-9][0-9]{0,18})/",
            "number": r"/-?(0|[1-9][0-9]{0,18})(\.[0-9]{1,18})?([eE][+-]?[0-9]{1,3})?/"}


def widened(schema: Any) -> tuple[Any, list[Fault]]:
    """A schema without what has no rule in this notation, and what that was."""
    schema = copy.deepcopy(schema)
    faults: list[Fault] = []
    waiting: list[tuple[Path, Any]] = [((), schema)]
    while waiting:
        path, node = waiting.pop()
        if not isinstance(node, dict):
            continue
        for key in [key for key in node if key not in _KNOWN]:
            del node[key]
            faults.append(Fault((*path, key), "the model's notation of calls has no rule for this keyword"))
        for key in ("const", "enum"):
            values = node.get(key) if key == "enum" else [node.get(key)]
            if isinstance(values, list) and any(isinstance(value, dict | list) for value in values):
                del node[key]
                faults.append(Fault((*path, key), "the model's notation has no lists or objects here"))
        properties = node.get("properties") or {}
        # names that no notation without quotes can spell would be read as something else
        for name in [name for name in properties if not re.fullmatch(r"[^\s<>{}\[\],:\"]+", name)]:
            del properties[name]
            faults.append(Fault((*path, "properties", name), "the model's notation of calls can't spell it"))
        if isinstance(required := node.get("required"), list):
            node["required"] = [name for name in required if name in properties]
        waiting += [((*path, *place), part) for place, part in children(node)]
    return schema, faults


class ArgumentsGrammar:
    """Writes the arguments of tools.

    Args:
        quote: the grammar's literal for what stands around a string.
        special: whether that is a special token, which no text can contain.
    """

    def __init__(self, quote: str, special: bool) -> None:
        self._quote = quote
        self._text = r"/(.|\n){0,4000}/" if special else r"/[^<]{0,4000}/"

    def object(self, schema: Mapping[str, Any]) -> str:
        """An expression for an object of a JSON schema, from which :func:`widened` took what has no rule."""
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        names = sorted(properties)  # as the model's template writes them
        fields = {name: f"{json.dumps(name + ':')} {self._value(properties[name])}" for name in names}
        first = next((number for number, name in enumerate(names) if name in required), None)
        if first is None:
            starts = [f"{fields[name]} " + self._more(names[number + 1:], fields, required)
                      for number, name in enumerate(names)]
            body = f"({' | '.join(starts)})?" if starts else ""
        else:
            before = " ".join(f'({fields[name]} ",")?' for name in names[:first])
            body = f"{before} {fields[names[first]]} {self._more(names[first + 1:], fields, required)}"
        return f'"{{" {body} "}}"'

    def _more(self, names: list[str], fields: Mapping[str, str], required: set[str]) -> str:
        return " ".join(f'("," {fields[name]}){"" if name in required else "?"}' for name in names)

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return self._anything()
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return "(" + " | ".join(self._constant(value) for value in values) + ")"
        if "anyOf" in schema:
            return "(" + " | ".join(self._value(branch) for branch in schema["anyOf"]) + ")"
        kinds = schema.get("type")
        kinds = list(kinds) if isinstance(kinds, list) else [kinds]
        if schema.get("nullable"):
            kinds.append("null")
        return "(" + " | ".join(self._kind(kind, schema) for kind in kinds) + ")"

    def _kind(self, kind: Any, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return f"{self._quote} {self._text} {self._quote}"
        if kind in _NUMBERS:
            return _NUMBERS[kind]
        if kind == "boolean":
            return '"true" | "false"'
        if kind == "null":
            return '"null"'
        if kind == "array":
            item = self._value(schema.get("items"))
            low, high = (_count(schema.get(key), default) for key, default in (("minItems", 0),
                                                                               ("maxItems", _MAX_ITEMS)))
            if high == 0:
                return '"[" "]"'
            items = f'{item} ("," {item}){{{max(low - 1, 0)},{max(low, high) - 1}}}'
            return f'"[" {items} "]"' if low else f'"[" ({items})? "]"'
        if kind == "object" and schema.get("properties"):
            return self.object(schema)
        return self._anything()

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value)} {self._quote}"
        return json.dumps(json.dumps(value))

    def _anything(self) -> str:
        """A value that the schema says nothing about: one that isn't nested."""
        return f"({self._quote} {self._text} {self._quote} | {_ANY})"


def _count(value: Any, default: int) -> int:
    return min(int(value), _MAX_ITEMS) if isinstance(value, int | float) and value >= 0 else default
