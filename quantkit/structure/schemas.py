"""JSON schemas of requests: what of a schema llguidance can keep, and where the rest of it stands.

llguidance implements the commonest keywords of JSON schema. :func:`widened` takes those that it doesn't
implement out of a schema, so that more texts fit the schema than before and never fewer, and says which ones
they were. What it overlooks, llguidance finds (:func:`quantkit.structure.trial.widen`).
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote

Path = tuple[str | int, ...]
"""Keys and indices from the root of a schema."""
DEFINITIONS = ("$defs", "definitions")
COMBINED = {"allOf", "anyOf", "oneOf", "not", "if", "$ref", "$dynamicRef", "patternProperties"}
"""Keywords beside which a key that an object doesn't name may be meant."""
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid",
                     "uri", "unknown"})
"""Formats that llguidance knows."""
_MAPS = ("properties", "patternProperties")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "additionalItems")
_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_UNSUPPORTED = {"not": "", "if": "", "then": "", "else": "", "contains": "array", "minContains": "array",
                "maxContains": "array", "uniqueItems": "array", "unevaluatedItems": "array",
                "propertyNames": "object", "dependencies": "object", "dependentRequired": "object",
                "dependentSchemas": "object", "unevaluatedProperties": "object", "$dynamicRef": "",
                "$recursiveRef": "", "$dynamicAnchor": "", "$recursiveAnchor": ""}
"""Keywords that llguidance refuses, with the type of the values that they are about."""
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_ABOUT_KEYS = COMBINED | {"properties", "required", "minProperties", "propertyNames", "enum", "const"}
_EXACT = 2**53
_INT64 = 2**63
_LARGEST_NUMBER = 10**18
"""llguidance computes bounds of integers as doubles and 64-bit integers, and those of numbers as doubles."""
_NAME = re.compile(r"[A-Za-z_$][A-Za-z0-9_$-]*")
_REGEX_TOKEN = re.compile(r"\\(?P<back>[1-9k])|\\(?P<edge>[bB])|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]"
                          r"|\(\?(?P<look><?[=!])|.", re.DOTALL)


@dataclass(frozen=True)
class Fault:
    """What of a schema can't be kept.

    Attributes:
        path: the place of the keyword.
        reason: why, as the end of a sentence about the path.
    """

    path: Path
    reason: str

    def __str__(self) -> str:
        """``$.properties.to.pattern: look-around isn't supported``."""
        return f"{path_text(self.path)}: {self.reason}"


def path_text(path: Path) -> str:
    """A place in a schema as a JSON path in printable ASCII: ``$.properties.to.anyOf[0]``."""
    text = "$"
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if _NAME.fullmatch(part) else f"[{json.dumps(part)}]"
    return text


def arguments_schema(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, which are always an object. A schema that says nothing about this
    object is how clients write that a tool has no parameters: then the object is empty."""
    schema = {"type": "object", **parameters}
    if not any(schema.get(key) for key in _ABOUT_KEYS):
        schema.setdefault("additionalProperties", False)
    return schema


def closed(schema: Any) -> Any:
    """A schema whose objects have no keys but those that it names, where it doesn't say otherwise: a model
    that may invent keys goes on inventing them. Parts that are combined with others stay as they are."""
    if not isinstance(schema, dict):
        return schema
    changed = dict(schema)
    if COMBINED & schema.keys():
        return changed
    if isinstance(properties := schema.get("properties"), dict):
        changed["properties"] = {name: closed(value) for name, value in properties.items()}
        changed.setdefault("additionalProperties", False)
    if "items" in schema:
        changed["items"] = closed(schema["items"])
    return changed


def rebased(schema: Any, prefix: str) -> Any:
    """A schema as part of another document, at ``prefix`` (``#/properties/x``): its references to its own
    parts are changed."""
    schema = copy.deepcopy(schema)
    waiting = [schema]
    while waiting:
        if not isinstance(node := waiting.pop(), dict):
            continue
        waiting += [part for _, part in children(node)]
        for key in DEFINITIONS:
            if isinstance(parts := node.get(key), dict):
                waiting += parts.values()
        if isinstance(node.get("$id"), str):  # it would be what references are relative to
            del node["$id"]
        reference = node.get("$ref")
        if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
            node["$ref"] = prefix + reference[1:].rstrip("/")
    return schema


def pointer(path: Path) -> str:
    """A place in a schema as a reference has it, behind the ``#``."""
    return "".join("/" + quote(str(part).replace("~", "~0").replace("/", "~1"), safe="$~") for part in path)


def children(schema: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The schemas that a schema consists of, without its definitions, and where they stand."""
    for key in _MAPS:
        if isinstance(part := schema.get(key), dict):
            yield from (((key, name), value) for name, value in part.items())
    for key in (*_LISTS, *_SINGLE):
        part = schema.get(key)
        if isinstance(part, list):
            yield from (((key, number), value) for number, value in enumerate(part))
        elif key in _SINGLE and isinstance(part, dict):
            yield (key,), part


def resolved(root: Any, reference: Any) -> Path | None:
    """The place in ``root`` that a reference means; ``None`` if it isn't there."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    path: list[str | int] = []
    for part in unquote(reference[1:]).strip("/").split("/") if len(reference) > 2 else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and name.isascii() and name.isdigit() and int(name) < len(root):
            path.append(int(name))
        elif isinstance(root, dict) and name in root:
            path.append(name)
        else:
            return None
        root = root[path[-1]]
    return tuple(path)


def at(schema: Any, path: Path) -> Any:
    """The part of a schema at a path."""
    for part in path:
        schema = schema[part]
    return schema


def without(schema: Any, path: Path) -> Any:
    """A schema in which a keyword, or a whole schema, at a path says nothing."""
    changed = copy.deepcopy(schema)
    if not path:
        return {}
    parent, last = at(changed, path[:-1]), path[-1]
    if last == "oneOf" and isinstance(parent, dict) and "anyOf" not in parent:
        parent["anyOf"] = parent.pop("oneOf")
    elif last == "patternProperties":  # a key that fits a pattern would be an additional one now
        del parent[last]
        parent.pop("additionalProperties", None)
    elif isinstance(parent, list) or isinstance(parent[last], dict):
        parent[last] = {}
    else:
        del parent[last]
    return changed


def widened(schema: Any) -> tuple[Any, list[Fault]]:
    """A schema without what llguidance can't keep.

    Returns:
        A schema that every text fits that the given one describes, and what was taken out of it. Keywords
        that change nothing are taken out too, and aren't listed.
    """
    schema = copy.deepcopy(schema)
    faults: list[Fault] = []
    waiting: list[Path] = [()]
    seen: set[Path] = set()
    while waiting:
        if (path := waiting.pop()) in seen:
            continue
        seen.add(path)
        node = at(schema, path)
        if isinstance(node, dict):
            _Widening(node, path, faults).run()
            waiting += [path + inside for inside, _ in children(node)]
            if (target := resolved(schema, node.get("$ref"))) is not None:
                waiting.append(target)
    return schema, sorted(faults, key=lambda fault: tuple(map(str, fault.path)))


class _Widening:
    """Takes out of one schema, not of those within it, what llguidance can't keep."""

    def __init__(self, node: dict[str, Any], path: Path, faults: list[Fault]) -> None:
        self._node = node
        self._path = path
        self._faults = faults
        kinds = node.get("type")
        self._kinds = frozenset(kind for kind in (kinds if isinstance(kinds, list) else [kinds])
                                if isinstance(kind, str))

    def run(self) -> None:
        node = self._node
        if "type" in node and (not self._kinds or not self._kinds <= _TYPES):
            self._take("type", f"{_short(node['type'])} is no type of JSON schema")
            self._kinds = frozenset()
        self._unsupported()
        self._shapes()
        for key in ("const", "enum"):
            self._constants(key)
        if self._about("string"):
            self._text()
        if isinstance(patterns := node.get("patternProperties"), dict):
            self._pattern_properties(patterns)
        if self._about("number") or self._about("integer"):
            self._bounds()

    def _about(self, kind: str) -> bool:
        """Whether the schema has to do with values of a type."""
        return not self._kinds or kind in self._kinds

    def _take(self, key: str, reason: str) -> None:
        del self._node[key]
        self._faults.append(Fault((*self._path, key), reason))

    def _unsupported(self) -> None:
        node = self._node
        branches = "then" in node or "else" in node
        idle = {key for key in ("then", "else") if "if" not in node}
        idle |= set() if branches else {"if"}
        idle |= set() if "contains" in node else {"minContains", "maxContains"}
        idle |= {"$dynamicAnchor", "$recursiveAnchor"}
        for key in [key for key in node if key in _UNSUPPORTED]:
            kind, value = _UNSUPPORTED[key], node[key]
            if key in idle or _asks_nothing(key, value) or (kind and not self._about(kind)):
                del node[key]
            else:
                self._take(key, "this keyword isn't supported")

    def _shapes(self) -> None:
        """Keywords whose values have the wrong shape, such as ``required: true`` of a property."""
        node = self._node
        for key in [key for key in node if key in _COUNTS]:
            if isinstance(node[key], float) and node[key].is_integer():
                node[key] = int(node[key])
        required = node.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            self._take("required", "it must be a list of names")
        if "enum" in node and not (isinstance(node["enum"], list) and node["enum"]):
            self._take("enum", "it must be a list with at least one value")

    def _constants(self, key: str) -> None:
        if key not in self._node:
            return
        values = [self._node[key]] if key == "const" else self._node[key]
        if any(not _exact(value) for value in values):
            self._take(key, "it has an integer of more than 53 bits")
            self._node.setdefault("type", sorted({_kind(value) for value in values}))

    def _text(self) -> None:
        node = self._node
        if isinstance(known := node.get("format"), str) and known not in FORMATS:
            self._take("format", f"the format {_short(known)} isn't supported")
        if isinstance(pattern := node.get("pattern"), str) and (reason := _regex_fault(pattern)):
            self._take("pattern", reason)

    def _pattern_properties(self, patterns: dict[str, Any]) -> None:
        reasons = {pattern: reason for pattern in patterns if (reason := _regex_fault(pattern))}
        for pattern, reason in reasons.items():
            self._faults.append(Fault((*self._path, "patternProperties", pattern), reason))
            del patterns[pattern]
        if reasons:  # a key that fits the pattern would be an additional one now
            self._node.pop("additionalProperties", None)

    def _bounds(self) -> None:
        """Bounds that doubles can't say exactly. Of integers they are moved to the next double within, which
        excludes at most 1,024 of the integers beyond 2^53."""
        node = self._node
        integers = "integer" in self._kinds and "number" not in self._kinds
        for key, strict, sign in (("minimum", "exclusiveMinimum", 1), ("maximum", "exclusiveMaximum", -1)):
            limits: list[int | float] = []  # with the sign of a minimum
            for name in (key, strict):
                value = node.get(name)
                if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) <= _EXACT:
                    continue
                if not integers:
                    if abs(value) >= _LARGEST_NUMBER:
                        self._take(name, "a bound of numbers must be below 10^18")
                    continue
                limit = math.ceil(sign * value)
                limits.append(limit + (name == strict and limit == sign * value))
                del node[name]
            if not limits:
                continue
            limit = sign * int(max(limits))
            if -_INT64 <= limit < _INT64:
                limit, kept = _double_within(limit, sign), node.get(key)
                small = isinstance(kept, int | float) and sign * kept > sign * limit
                node[key] = kept if small else limit
            else:
                self._faults.append(Fault((*self._path, key), "a bound of integers must fit 64 bits"))


def _asks_nothing(key: str, value: Any) -> bool:
    """Whether an unsupported keyword with this value allows everything."""
    if key == "uniqueItems":
        return value is False
    if key == "propertyNames" and value == {"type": "string"}:
        return True
    return key not in ("not", "contains", "if", "then", "else") and (value is True or value in ([], {}))


def _double_within(limit: int, sign: int) -> int:
    """The bound of integers nearest to ``limit`` that llguidance computes with exactly. ``sign``: 1 for a
    minimum, −1 for a maximum."""
    if limit == _INT64 - 1:  # llguidance's conversion of 2^63 to an integer saturates
        return limit
    double = float(limit)
    if sign * int(double) < sign * limit or int(double) == -_INT64:
        double = math.nextafter(double, sign * math.inf)
    return int(double)


def _regex_fault(pattern: str) -> str:
    """Why llguidance can't match a regular expression; empty if nothing is known against it."""
    for token in _REGEX_TOKEN.finditer(pattern):
        if token["look"]:
            return "look-around isn't supported"
        if token["back"]:
            return "references to groups aren't supported"
        if token["edge"]:
            return "borders of words aren't supported"
    return ""


def _exact(value: Any) -> bool:
    """Whether llguidance writes all integers in a constant exactly: it takes them for doubles."""
    if isinstance(value, dict | list):
        return all(map(_exact, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or abs(value) <= _EXACT or value == _INT64 - 1 or (
        abs(value) < _INT64 and int(float(value)) == value)


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _short(value: Any) -> str:
    return json.dumps(value)[:60]
