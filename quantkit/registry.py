"""Tables of names whose targets are imported lazily.

A thing is registered as an object or as ``"module:attr"``, which is imported the first time that
somebody asks for it. Listing names imports nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from quantkit.errors import PluginError, UsageError, did_you_mean

T = TypeVar("T")


@dataclass(frozen=True)
class RegistryEntry:
    """One registration: who made it, what it points to, and what its owner says about it."""

    name: str
    target: object
    owner: str
    about: Mapping[str, Any] = field(default_factory=dict)


class Registry(Generic[T]):
    """A table of one kind of thing.

    Args:
        kind: what it holds, for messages: ``"method"``.
        expects: the ``"module:Class"`` that a loaded target must be an instance of.
    """

    def __init__(self, kind: str, expects: str | None = None) -> None:
        self.kind, self._expects = kind, expects
        self._entries: dict[str, RegistryEntry] = {}
        self._loaded: dict[str, T] = {}

    def register(self, name: str, target: object, *, owner: str, **about: Any) -> None:
        """Add a name. Raises PluginError if it is taken, naming both owners."""
        if (old := self._entries.get(name)) is not None:
            raise PluginError(
                f"{self.kind} {name!r} is registered twice, by {old.owner} and by {owner}",
                why="a name means one thing; neither wins silently",
                next=f"uninstall one, or set QUANTKIT_PLUGINS to leave one out: pip uninstall {owner}")
        if isinstance(target, str) and target.count(":") != 1:
            raise PluginError(f"{self.kind} {name!r} of {owner} has target {target!r}",
                              why='a lazy target is written "module:attr"')
        self._entries[name] = RegistryEntry(name, target, owner, MappingProxyType(dict(about)))

    def get(self, name: str) -> T:
        """The thing called ``name``, imported now if needed.

        Raises:
            UsageError: no such name; the nearest is suggested.
            PluginError: its module fails to import, or it is of the wrong type.
        """
        if name in self._loaded:
            return self._loaded[name]
        if name not in self._entries:
            raise UsageError(f"no {self.kind} is called {name!r}", why=did_you_mean(name, self._entries),
                             next="quantkit plugins list")
        entry = self._entries[name]
        thing = load_target(entry.target, f"{self.kind} {name!r} of {entry.owner}")
        if self._expects and not isinstance(thing, load_target(self._expects, self.kind)):
            raise PluginError(f"{self.kind} {name!r} of {entry.owner} is a {type(thing).__name__}",
                              why=f"it must be a {self._expects.replace(':', '.')}")
        self._loaded[name] = thing
        return thing

    def entry(self, name: str) -> RegistryEntry:
        """The registration itself, importing nothing."""
        return self._entries[name]

    def drop_owner(self, owner: str) -> None:
        """Forget everything that ``owner`` registered."""
        self._entries = {k: e for k, e in self._entries.items() if e.owner != owner}

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)


def load_target(target: object, whose: str) -> Any:
    """Import ``"module:attr"``; any other object is returned as it is."""
    if not isinstance(target, str):
        return target
    module, attr = target.split(":")
    try:
        return getattr(importlib.import_module(module), attr)
    except (ImportError, AttributeError) as error:
        raise PluginError(f"{whose} can't be loaded from {target!r}", why=str(error)) from error
