"""What a request asks for and the server doesn't do: it is left out and named, or the request is refused.

Agents send keys for the one server that they were written for. By default such keys are ignored, and the
answer's header :data:`HEADER` names them. A strict server refuses them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from quantkit.serving.errors import ApiError

HEADER = "quantkit-ignored"
MAX_NOTED = 256
MAX_NAME = 64
MAX_HEADER = 1024
"""Of one request: keys that are noted, characters of one of them, and characters of the header."""
MAX_TOLD = 1024
"""Kinds of ignored keys, by client, that the log remembers."""
_UNPRINTABLE = re.compile(r"[^ -+.-~-]")
_UNSAFE, _INDEX = re.compile(r"[^A-Za-z0-9_.$/-]"), re.compile(r"\[\d+\]")


class Ignored:
    """What one request's reader and its answer leave out. Only one of them is at work at any time.

    Args:
        strict: whether the server refuses what it would otherwise leave out. Parts of a schema are noted all
            the same, because its own ``strict`` decides about them.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self._keys: dict[int, list[str]] = {}
        self._parts: dict[int, str] = {}
        self._others: list[str] = []
        self._noted = 0

    def __bool__(self) -> bool:
        return self._noted > 0

    def key(self, part: Mapping[Any, Any], name: str) -> None:
        """A key of an object of the body; the object must live until :meth:`names` is called."""
        self._noted += 1
        if self._noted <= MAX_NOTED:
            self._keys.setdefault(id(part), []).append(name)

    def part(self, part: Mapping[Any, Any], kind: str) -> None:
        """A whole object of the body, and what kind of thing it is."""
        self._noted += 1
        if self._noted <= MAX_NOTED:
            self._parts[id(part)] = kind

    def other(self, what: str) -> None:
        """Something else, as the header should name it: a path, perhaps with a reason in parentheses."""
        self._noted += 1
        if self._noted <= MAX_NOTED:
            self._others.append(_UNPRINTABLE.sub("?", what)[:2 * MAX_NAME])

    def names(self, body: Any) -> list[str]:
        """What is ignored, by JSON path. What stands at several indices is one name with ``[*]``.

        Args:
            body: the parsed request that the objects are part of.
        """
        paths = [*self._paths(body), *self._others]
        kinds: dict[str, list[str]] = {}
        for name in paths:
            kinds.setdefault(_INDEX.sub("[*]", name), []).append(name)
        return [names[0] if len(names) == 1 else kind for kind, names in kinds.items()]

    def _paths(self, body: Any) -> list[str]:
        paths: list[str] = []
        waiting: list[tuple[Any, str]] = [(body, "")] if self._keys or self._parts else []
        while waiting:
            item, path = waiting.pop()
            if id(item) in self._parts:
                paths.append(f"{path} ({safe(self._parts[id(item)])})")
                continue
            paths += [_joined(path, name) for name in self._keys.get(id(item), ())]
            inside = ([(value, _joined(path, name)) for name, value in item.items()
                       if isinstance(value, dict | list)] if isinstance(item, dict) else
                      [(value, f"{path}[{index}]") for index, value in enumerate(item)
                       if isinstance(value, dict | list)])
            waiting += reversed(inside)
        return paths


_OUTSIDE = Ignored(strict=True)
IGNORED: ContextVar[Ignored] = ContextVar("ignored", default=_OUTSIDE)
"""Of the request that is read or answered; outside of requests nothing is left out."""


def leave_out(param: str, reason: str) -> None:
    """Note that a parameter of the request isn't obeyed.

    Raises:
        ApiError: the server is strict.
    """
    if (ignored := IGNORED.get()).strict:
        raise ApiError(400, f"{param} is not supported: {reason}", param=param, code="unsupported_parameter")
    ignored.other(f"{param} ({reason})")


def header(names: Sequence[str]) -> str:
    """The header's value: printable ASCII of a bounded length."""
    value = ""
    for number, name in enumerate(_UNPRINTABLE.sub("?", name) for name in names):
        more = f" and {len(names) - number} more"
        if len(value) + len(name) + len(more) + 2 > MAX_HEADER:
            return value + more
        value += f"{', ' if value else ''}{name}"
    return value


def safe(text: str) -> str:
    """A client's word as it may stand in a header or in the log."""
    return _UNSAFE.sub("?", text[:MAX_NAME]) or "?"


class IgnoredLog:
    """Tells of each kind of ignored key once for each client.

    Args:
        tell: takes a line.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell, self._told = tell, set[tuple[str, str]]()

    def add(self, client: str, names: list[str]) -> None:
        """Note what a request of a client had. ``client``: its ``User-Agent``."""
        client = safe(client.partition(" ")[0]) if client else "an unnamed client"
        kinds = {_INDEX.sub("[*]", name): name for name in names}
        new = [name for kind, name in kinds.items() if (client, kind) not in self._told]
        if new and len(self._told) < MAX_TOLD:
            self._told |= {(client, kind) for kind in kinds}
            self._tell(f"ignored in requests of {client}: {header(new)}")


def _joined(path: str, name: Any) -> str:
    name = safe(str(name))
    return f"{path}.{name}" if path else name
