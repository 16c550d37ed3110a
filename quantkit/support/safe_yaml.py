"""Reads untrusted YAML strictly: values only, with limits, and errors that name the line.

YAML 1.2 (``no`` is a string, ``1e-5`` a number). Refused: duplicate keys, tags, directives, more
than one document, files over 256 KiB, more than 20,000 nodes counted *after* aliases are expanded
(which is what defuses an alias bomb), more than 32 anchors, nesting over 32 levels.
"""

from __future__ import annotations

import copy
import functools
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    CollectionEndEvent,
    CollectionStartEvent,
    DocumentStartEvent,
    NodeEvent,
    ScalarEvent,
)
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from quantkit.support.errors import QuantkitError, RecipeError, did_you_mean
from quantkit.support.paths import reading

MAX_BYTES = 256 * 1024
MAX_NODES = 20_000
MAX_ANCHORS = 32
MAX_DEPTH = 32
SHOWN = 5

M = TypeVar("M", bound=BaseModel)
Loc = tuple[str | int, ...]


class YamlDocument:
    """A parsed mapping and the line that each of its keys and items stands on.

    Attributes:
        label: how messages name the file.
        data: plain ``dict``, ``list``, ``str``, ``int``, finite ``float``, ``bool`` and ``None``.
    """

    def __init__(self, label: str, data: dict[str, Any], lines: dict[Loc, int],
                 error: type[QuantkitError]) -> None:
        self.label = label
        self.data = data
        self._lines = lines
        self._error = error

    def line(self, loc: Loc) -> int:
        """The line, from 1, of the deepest part of ``loc`` that the file holds."""
        while loc and loc not in self._lines:
            loc = loc[:-1]
        return self._lines.get(loc, 1)

    def build(self, model: type[M], data: dict[str, Any] | None = None) -> M:
        """Validate against a pydantic model.

        Args:
            model: the class that the file describes; it should forbid unknown keys.
            data: used instead of :attr:`data`, when a caller took keys out of it.

        Raises:
            QuantkitError: of the document's error class, with the line of every fault and, for an
                unknown key, the nearest known one.
        """
        try:
            return model.model_validate(self.data if data is None else data)
        except ValidationError as error:
            faults = [self._fault(model, dict(f)) for f in error.errors(include_url=False)]
        more = [f"and {len(faults) - SHOWN} more"] if len(faults) > SHOWN else []
        raise self._error(f"{self.label} is not a valid {model.__name__.lower()}",
                          why="\n".join(faults[:SHOWN] + more), next=f"edit {self.label}") from None

    def _fault(self, model: type[BaseModel], fault: dict[str, Any]) -> str:
        loc: Loc = fault["loc"]
        where = ".".join(str(part) for part in loc)
        if fault["type"] == "extra_forbidden":
            owner = _model_at(model, loc[:-1])
            known = owner.model_fields if owner else ()
            inside = ".".join(str(part) for part in loc[:-1])
            place = f" in {inside}" if inside else ""
            text = f"unknown key {loc[-1]!r}{place}: {did_you_mean(str(loc[-1]), known)}"
        else:
            text = f"{where}: {fault['msg']}" if where else str(fault["msg"])
        return f"line {self.line(loc)}: {text}"


def _model_at(model: type[BaseModel], loc: Loc) -> type[BaseModel] | None:
    """The pydantic model that a location inside ``model`` belongs to."""
    current: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int):
            continue
        if current is None or part not in current.model_fields:
            return None
        current = _model_in(current.model_fields[part].annotation)
    return current


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next(filter(None, map(_model_in, typing.get_args(annotation))), None)


def read_yaml(path: Path, error: type[QuantkitError] = RecipeError) -> YamlDocument:
    """Read a YAML file whose top level is a mapping. Raises ``error``."""
    with reading(path, error), path.open("rb") as file:
        raw = file.read(MAX_BYTES + 1)
    return parse_yaml(raw, str(path), error)


def parse_yaml(raw: bytes, label: str, error: type[QuantkitError] = RecipeError) -> YamlDocument:
    """Parse YAML bytes whose top level is a mapping. Raises ``error`` for anything else."""
    try:
        data, lines = _parsed(raw)
    except _Refused as refusal:
        raise error(f"{label} can't be used", why=str(refusal), next=f"edit {label}") from None
    return YamlDocument(label, copy.deepcopy(data), lines, error)


@functools.lru_cache(maxsize=128)
def _parsed(raw: bytes) -> tuple[dict[str, Any], dict[Loc, int]]:
    """The mapping and the lines of :class:`YamlDocument`. Recipes extend each other, and a command that lists
    all of them reads some many times."""
    if len(raw) > MAX_BYTES:
        raise _Refused(f"it is larger than {MAX_BYTES // 1024} KiB")
    try:
        text = raw.decode("utf-8")
        _check_events(text)
        node = YAML(typ="safe", pure=True).compose(text)
        data = YAML(typ="safe", pure=True).load(text)
        lines: dict[Loc, int] = {}
        if isinstance(node, MappingNode):
            _walk(node, (), lines, [0])
        _check_values(data)
    except UnicodeDecodeError as cause:
        raise _Refused(f"it is not UTF-8 (byte {cause.start})") from None
    except MarkedYAMLError as cause:
        mark = cause.problem_mark or cause.context_mark
        at = f"line {mark.line + 1}: " if mark else ""
        raise _Refused(at + " ".join(str(cause.problem or cause.context or "").split())) from None
    except (YAMLError, _Refused) as cause:
        raise _Refused(str(cause).strip()) from None
    except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError,
            RecursionError, NotImplementedError) as cause:
        # a scanner that meets what it never expected may raise any of these on hostile text
        raise _Refused(f"it is not valid YAML ({type(cause).__name__}: {cause})") from None
    if not isinstance(data, dict) or not isinstance(node, MappingNode):
        raise _Refused("line 1: it must be a mapping of keys to values")
    return data, lines


class _Refused(Exception):
    """Why a text isn't taken: a rule of ours, or of YAML's."""


def _check_events(text: str) -> None:
    """Bound the stream before anything is built from it."""
    depth = nodes = anchors = documents = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        at = f"line {event.start_mark.line + 1}: " if event.start_mark else ""
        if isinstance(event, DocumentStartEvent):
            documents += 1
            if event.version or event.tags:
                raise _Refused(at + "directives (%YAML, %TAG) are not allowed")
            if documents > 1:
                raise _Refused(at + "only one document a file")
        if isinstance(event, NodeEvent):
            nodes += 1
            if not isinstance(event, AliasEvent) and event.anchor:
                anchors += 1
        if isinstance(event, ScalarEvent | CollectionStartEvent) and event.tag is not None:
            raise _Refused(at + f"tags ({event.tag}) are not allowed")
        depth += isinstance(event, CollectionStartEvent)
        depth -= isinstance(event, CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _Refused(at + f"nested deeper than {MAX_DEPTH} levels")
        if nodes > MAX_NODES:
            raise _Refused(at + f"more than {MAX_NODES:,} nodes")
        if anchors > MAX_ANCHORS:
            raise _Refused(at + f"more than {MAX_ANCHORS} anchors")


def _walk(node: Node, loc: Loc, lines: dict[Loc, int], count: list[int]) -> None:
    """Note every key's line, walking aliases as often as they are used, within the budget."""
    count[0] += 1
    if count[0] > MAX_NODES or len(loc) > MAX_DEPTH:
        raise _Refused(f"its aliases expand to more than {MAX_NODES:,} nodes or {MAX_DEPTH} levels")
    lines.setdefault(loc, node.start_mark.line + 1)
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            _walk(item, (*loc, index), lines, count)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                raise _Refused(f"line {key.start_mark.line + 1}: a key must be a plain word")
            name = (*loc, str(key.value))
            lines[name] = key.start_mark.line + 1
            _walk(value, name, lines, count)


def _check_values(value: Any) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise _Refused(f"the key {key!r} must be text")
            _check_values(key)
            _check_values(item)
    elif isinstance(value, list):
        for item in value:
            _check_values(item)
    elif isinstance(value, float) and not math.isfinite(value):
        raise _Refused(f"the number {value} is not finite")
    elif isinstance(value, str) and any("\ud800" <= character <= "\udfff" for character in value):
        raise _Refused(f"{value[:80]!r} holds half of a surrogate pair")
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise _Refused(f"{value!r} is a {type(value).__name__}; quote it to mean text")
