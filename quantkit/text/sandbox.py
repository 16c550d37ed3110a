"""jinja2's immutable sandbox with a budget of operations: templates can neither reach Python nor run forever.

The sandbox alone leaves work unbounded: a loop over a loop, a string that doubles, a list that holds
itself twice over. Here every iteration, call, filter, output and composed value is charged to one
:class:`UsageMeter`, and the few operations that can make much out of little are checked before they run.
The meter looks between operations only; :mod:`quantkit.text.rendering` bounds what a single one costs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import datetime
from math import isfinite
from typing import Any

import jinja2
from jinja2 import nodes, pass_context
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_SECONDS = 2.0
MAX_WORK = 64 * 2**20
"""Characters that a template may handle in all, intermediate ones included."""
MAX_OUTPUT = 4 * 2**20
"""Characters of the result, and of any value on the way to it."""
STEP = 512
"""What one operation costs, in characters: 131,072 operations are a full budget."""
MAX_NODES = 20_000
"""Of a parsed template; real ones have up to 3,000."""
MAX_RANGE = 100_000
MAX_INTEGER_BITS = 256
MAX_INDENT = 16

# filters whose names no template can spell
_CHARGE, _WRITE = "quantkit charge", "quantkit write"

_FILTERS = frozenset({
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "groupby",
    "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
    "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "sort", "string", "sum",
    "title", "trim", "unique", "upper", "wordcount"})
_METHODS: dict[type, frozenset[str]] = {
    str: frozenset({
        "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal",
        "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip",
        "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit",
        "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper"}),
    list: frozenset({"count", "index"}), tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset(), float: frozenset(), range: frozenset({"count", "index"})}


class LimitExceeded(Exception):
    """A template asked for more than it may have; the message says of what."""


class UsageMeter:
    """What one rendering has left.

    Raises:
        LimitExceeded: from any method, when a limit is passed.
    """

    def __init__(self) -> None:
        self._end = time.monotonic() + MAX_SECONDS
        self._work, self._written = MAX_WORK, 0

    def spend(self, characters: int = 0) -> None:
        """Charge one operation that handles this number of characters."""
        self._work -= STEP + characters
        if self._work < 0:
            raise LimitExceeded("it does more work than any conversation needs")
        if time.monotonic() > self._end:
            raise LimitExceeded(f"it takes more than {MAX_SECONDS:g} s")

    def value(self, value: Any) -> Any:
        """Charge a value by what it would be when written out; returns it."""
        self.spend(self._size(value))
        return value

    def write(self, value: Any) -> Any:
        """Charge a value that is about to be written; returns it."""
        self._written += len(value) if isinstance(value, str) else self._size(value)
        if self._written > MAX_OUTPUT:
            raise LimitExceeded(f"it writes more than {MAX_OUTPUT} characters")
        return self.value(value)

    def _size(self, value: Any) -> int:
        size, waiting = 0, [value]
        while waiting:
            node = waiting.pop()
            size += len(node) if isinstance(node, str) else 8
            if size > MAX_OUTPUT:
                raise LimitExceeded(f"a value in it has more than {MAX_OUTPUT} characters")
            if isinstance(node, dict):
                waiting += [*node.keys(), *node.values()]
            elif isinstance(node, list | tuple):
                size += 8 * len(node)
                waiting += node[:MAX_OUTPUT // 8]
            elif isinstance(node, int) and node.bit_length() > MAX_INTEGER_BITS:
                raise LimitExceeded("a number in it is too large")
        return size


class _Metered(NodeTransformer):
    """Wraps what composes, writes or repeats in charges to the meter."""

    _COMPOSES = (nodes.Add, nodes.Call, nodes.Concat, nodes.Dict, nodes.Filter, nodes.List, nodes.Mul)

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            node.body.insert(0, _tick(node))
        elif isinstance(node, nodes.Output):
            node.nodes = [_through(_WRITE, nodes.Const(n.data, lineno=n.lineno)
                                   if isinstance(n, nodes.TemplateData) else n) for n in node.nodes]
        elif isinstance(node, nodes.CallBlock):  # jinja2 wants a bare call there
            assert isinstance(node.call, nodes.Filter) and isinstance(node.call.node, nodes.Call)
            node.call = node.call.node
        elif isinstance(node, nodes.Concat):  # all operands exist before the first is joined
            node.nodes = [_through(_CHARGE, n) for n in node.nodes]
        if isinstance(node, self._COMPOSES) or (isinstance(node, nodes.Tuple) and node.ctx == "load") or (
                isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)):
            return _through(_CHARGE, node)
        return node


def _through(name: str, node: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _tick(node: nodes.Node) -> nodes.ExprStmt:
    call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None, lineno=node.lineno)
    return nodes.ExprStmt(call, lineno=node.lineno)


class _Namespace(jinja2.utils.Namespace):
    """Namespaces can hold one another; written out in full, that could go on for ever."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Generation(Extension):
    """``{% generation %}`` marks what training learns from; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The body, in a scope of its own as transformers renders it."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class MeteredSandbox(ImmutableSandboxedEnvironment):
    """The environment of one rendering at a time; each needs a :class:`UsageMeter` of its own.

    Templates have what chat templates are written for: ``raise_exception``, ``strftime_now``,
    ``tojson`` without HTML escapes, ``namespace``, ``dict``, ``range``, loop controls.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, cache_size=0,
                         extensions=["jinja2.ext.loopcontrols", _Generation])
        self.meter = UsageMeter()
        self.globals.clear()
        self.globals.update(raise_exception=_refuse, strftime_now=_now, range=_range, dict=dict,
                            namespace=_Namespace)
        allowed = {name: self.filters[name] for name in _FILTERS}
        self.filters.clear()
        self.filters.update(allowed)
        self.filters.update({"replace": self._replace, "join": self._join, "indent": self._indent,
                             "sum": self._sum, "tojson": _tojson, _CHARGE: _charge, _WRITE: _write})

    def tick(self) -> None:
        """Called once an iteration; :meth:`call` does the charging."""

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        if sum(1 for _ in tree.find_all(nodes.Node)) > MAX_NODES:
            raise LimitExceeded(f"it has more than {MAX_NODES} parts")
        if any(isinstance(n.value, float) and not isfinite(n.value) for n in tree.find_all(nodes.Const)):
            raise LimitExceeded("a number in it is too large")  # jinja2 would write it as the name ``inf``
        changed = _Metered().visit(tree)
        assert isinstance(changed, nodes.Template)
        return changed

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Allow, on plain values, only methods that are known to be harmless."""
        for kind, names in _METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """An attempt is an error, whatever comes of it."""
        raise jinja2.sandbox.SecurityError(f"{attribute!r} of a {type(obj).__name__} is out of bounds")

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` can ask for any width: it is not among the methods."""
        return None

    def call(self, context: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Charge, look at what could grow, then call."""
        self.meter.spend()
        owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(owner, str) and name == "replace":
            self._check_replace(owner, *args)
        elif isinstance(owner, str) and name == "join" and args:
            args = (self._check_join(args[0], owner), *args[1:])
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Arithmetic on numbers, ``+`` on texts and lists; nothing that repeats or formats."""
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" or (operator in "*%" and not numbers):
            raise LimitExceeded(f"it uses {operator!r} on {type(left).__name__} and {type(right).__name__}")
        return super().call_binop(context, operator, left, right)

    def _check_replace(self, text: str, old: str, new: str, count: int = -1) -> None:
        occurrences = text.count(str(old))
        grown = len(text) + (occurrences if count is None
                             or count < 0 else min(occurrences, count)) * len(str(new))
        if grown > MAX_OUTPUT:
            raise LimitExceeded(f"a replacement makes more than {MAX_OUTPUT} characters")
        self.meter.spend(grown)

    def _check_join(self, parts: Any, between: str) -> list[Any]:
        parts = list(parts)
        self.meter.value(parts)
        if len(parts) * len(between) > MAX_OUTPUT:
            raise LimitExceeded(f"a join makes more than {MAX_OUTPUT} characters")
        return parts

    def _replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        self._check_replace(str(value), old, new, -1 if count is None else count)
        return str(value).replace(str(old), str(new), -1 if count is None else count)

    def _join(self, value: Any, d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = map(jinja2.filters.make_attrgetter(self, attribute), value)
        return str(d).join(map(str, self._check_join(value, str(d))))

    def _sum(self, value: Any, attribute: str | int | None = None, start: float = 0) -> Any:
        if not isinstance(start, int | float):
            raise LimitExceeded(f"it adds up {type(start).__name__}s")
        return jinja2.filters.sync_do_sum(self, value, attribute, start)

    def _indent(self, value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
        room = len(width) if isinstance(width, str) else width
        lines = str(value).count("\n") + 2
        if not 0 <= room <= MAX_INDENT or len(value) + lines * room > MAX_OUTPUT:
            raise LimitExceeded(f"it indents by {room}")
        return jinja2.filters.do_indent(str(value), width, first, blank)


@pass_context  # which also keeps jinja2 from folding constants before there is a meter
def _charge(context: jinja2.runtime.Context, value: Any) -> Any:
    return _meter(context).value(value)


@pass_context
def _write(context: jinja2.runtime.Context, value: Any) -> Any:
    return _meter(context).write(value)


def _meter(context: jinja2.runtime.Context) -> UsageMeter:
    assert isinstance(context.environment, MeteredSandbox)
    return context.environment.meter


def _refuse(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _now(form: object) -> str:
    return datetime.now().strftime(str(form)[:64])


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if abs(numbers.start) > 2**60 or len(numbers) > MAX_RANGE:
        raise LimitExceeded(f"a range in it has {len(numbers)} numbers" if abs(numbers.start) <= 2**60 else
                            "a range in it is too large")
    return numbers


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    if indent is not None and not 0 <= int(indent) <= MAX_INDENT:
        raise LimitExceeded(f"it indents by {indent}")
    if separators is not None and len("".join(separators)) > MAX_INDENT:
        raise LimitExceeded("its JSON separators are too long")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)
