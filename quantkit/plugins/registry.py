"""Tables of names whose targets are imported lazily.

A thing is registered as an object or as ``"module:attr"``, which is imported the first time that
somebody asks for it. Listing names imports nothing.
"""

from __future__ import annotations

import dis
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from quantkit.plugins.first_party import explain_absent
from quantkit.support.errors import PluginError, QuantkitError, UsageError, did_you_mean

T = TypeVar("T")
_RAISE = dis.opmap["RAISE_VARARGS"]
BUILTIN = "quantkit"
"""The distribution whose names stay its own."""
SPELLING = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names that a recipe, a command line and ``--kv`` can spell."""
_NO_STRING = re.compile(r"(?i:null|true|false)|0x[0-9A-Fa-f]+|0o[0-7]+|[0-9]+(\.[0-9]*)?([eE]-?[0-9]+)?")
"""Of those, what YAML reads as something other than a string."""


@dataclass(frozen=True)
class RegistryEntry:
    """One registration.

    Attributes:
        name: by which it is asked for.
        target: the thing itself, or where it is, ``"module:attr"``.
        owner: the distribution that registered it.
        about: what its owner says about it.
        plugin: the name of the owner's entry point; empty if it wasn't loaded from one.
        version: of the distribution, if it is known.
    """

    name: str
    target: object
    owner: str
    about: Mapping[str, Any] = field(default_factory=dict)
    plugin: str = ""
    version: str = ""

    @property
    def by(self) -> str:
        """``quantkit-hqq 0.1.0 (plugin 'hqq')``."""
        plugin = f" (plugin {self.plugin!r})" if self.plugin not in ("", self.owner) else ""
        return " ".join(filter(None, (self.owner, self.version))) + plugin


class Registry(Generic[T]):
    """A table of one kind of thing.

    A built-in's name can't be taken. A name that several others register is contested: the table goes on
    without it, and asking for it is an error.

    Args:
        kind: what it holds, for messages: ``"method"``.
        expects: the ``"module:Class"`` that a loaded target must be an instance of.
        subclass: a target must be a concrete subclass of ``expects`` instead.
        named: a thing's ``name`` must be the one under which it is registered: what runs is chosen, told and
            blamed by it.
        beside: another table in which no name of this one may stand: whoever writes a name doesn't say which
            of the two is meant.
    """

    def __init__(self, kind: str, expects: str | None = None, *, subclass: bool = False,
                 named: bool = False, beside: Registry[Any] | None = None) -> None:
        self.kind, self._expects, self._subclass, self._named = kind, expects, subclass, named
        self._entries: dict[str, RegistryEntry] = {}
        self._loaded: dict[str, T] = {}
        self._broken: dict[str, str] = {}
        self._warned: set[str] = set()
        self._contested: set[str] = set() if beside is None else beside._contested
        self._claims: dict[str, list[tuple[str, RegistryEntry]]] = {} if beside is None else beside._claims

    def register(self, name: str, target: object, *, owner: str, **about: Any) -> None:
        """Add a name. Raises PluginError if it is taken, naming both owners, or as :meth:`check`."""
        entry = RegistryEntry(name, target, owner, MappingProxyType(dict(about)))
        self.check(entry)
        if self.claimed(name):
            raise self.collision(entry)
        self.add(entry)

    def check(self, entry: RegistryEntry) -> None:
        """Look at a name and its target; whether the name is free isn't asked.

        Raises:
            PluginError: nobody can spell the name, or the target can't be one.
        """
        name, target = entry.name, entry.target
        what = f"{self.kind} {name!r} of {entry.by}"
        if not isinstance(name, str):
            raise PluginError(f"a {self.kind} of {entry.by} is registered as {a_type(name)}",
                              why="register(name, target) takes the name first, a text")
        if not SPELLING.fullmatch(name):
            raise PluginError(f"{what} can't have this name", next="give it a name that is spelled so",
                              why="recipes, --kv and command lines spell names [A-Za-z0-9][A-Za-z0-9._-]*, "
                                  "with 64 characters at most")
        if _NO_STRING.fullmatch(name):
            raise PluginError(f"{what} can't have this name", next="give it another name",
                              why="a recipe doesn't read it as a text")
        if target is None:
            raise PluginError(f"{what} has no target", why='a target is an object or "module:attr"')
        if isinstance(target, str):
            module, colon, attr = target.partition(":")
            if not (colon and attr.isidentifier() and all(map(str.isidentifier, module.split(".")))):
                raise PluginError(f"{what} has target {target!r}",
                                  why='a lazy target is written "module:attr"')

    def claimed(self, name: str) -> tuple[RegistryEntry, ...]:
        """Who registered ``name`` here, or in the table beside, in order."""
        return tuple(entry for _, entry in self._claims.get(name, ()))

    def shares_names(self, other: Registry[Any]) -> bool:
        """Whether a name may stand in only one of the two tables."""
        return self._claims is other._claims

    def add(self, entry: RegistryEntry) -> None:
        """Add a checked entry. If the name is taken, it is contested from now on."""
        claims = self._claims.setdefault(entry.name, [])
        claims.append((self.kind, entry))
        if len(claims) > 1:
            self._contested.add(entry.name)
        self._entries.setdefault(entry.name, entry)
        self._loaded.pop(entry.name, None)

    def collision(self, entry: RegistryEntry | None = None, name: str = "") -> PluginError:
        """The error that says who else has the name of ``entry``; or, without one, who contest ``name``."""
        claims = list(self._claims.get(entry.name if entry else name, ()))
        claims += [(self.kind, entry)] if entry else []
        name, owners = claims[0][1].name, [claim.owner for _, claim in claims]
        kinds = {kind for kind, _ in claims}
        by = [f"{f'as {kind} ' if len(kinds) > 1 else ''}by "
              f"{claim.owner if owners.count(claim.owner) == 1 else claim.by}" for kind, claim in claims]
        last = claims[-1][1]
        if owners[0] == BUILTIN:
            then = "register it under another name"
        else:
            then = (f"uninstall one, or leave one out by naming the others in QUANTKIT_PLUGINS: "
                    f"pip uninstall {last.owner}")
        times = "twice" if len(claims) == 2 else f"{len(claims)} times"
        return PluginError(f"{self.kind} {name!r} is registered {times}, {', '.join(by[:-1])} and {by[-1]}",
                           why="a name means one thing; neither wins silently", next=then)

    def get(self, name: str) -> T:
        """The thing called ``name``, imported now if needed.

        Raises:
            UsageError: no such name; the nearest is suggested.
            PluginError: several plugins registered the name, its module fails to import, it is of the wrong
                type or has another name.
        """
        if name in self._loaded:
            return self._loaded[name]
        if self._is_contested(name):
            raise self.collision(name=name)
        if name not in self._entries:
            why, then = explain_absent(self.kind, name) or (did_you_mean(name, self), "quantkit plugins list")
            raise UsageError(f"no {self.kind} is called {name!r}", why=why, next=then)
        entry = self._entries[name]
        whose = f"{self.kind} {name!r} of {entry.by}"
        thing = load_target(entry.target, whose, entry.plugin)
        if self._expects and (problem := self._misfit(thing, load_target(self._expects, self.kind))):
            raise PluginError(f"{whose} is {problem}", next=_check(entry.plugin),
                              why=f"it must be a {'subclass of ' if self._subclass else ''}"
                                  f"{self._expects.replace(':', '.')}")
        if self._named and (name_of := _name_of(thing)) != repr(name):
            raise PluginError(f"{whose} has name {name_of}", next=_check(entry.plugin),
                              why="a thing has the name under which it is registered")
        self._loaded[name] = thing
        return thing

    def _misfit(self, thing: Any, expected: type) -> str | None:
        """What a thing is instead of what is expected; ``None`` if it fits."""
        actual = f"the class {thing.__name__}" if isinstance(thing, type) else a_type(thing)
        try:
            if not self._subclass:
                return None if isinstance(thing, expected) and not isinstance(thing, type) else actual
            if not (isinstance(thing, type) and issubclass(thing, expected)):
                return actual
        except Exception as error:  # its attributes may be properties, which run a stranger's code
            return f"{actual} that raises {described(error)}"
        if inspect.isabstract(thing):
            lacking = sorted(getattr(thing, "__abstractmethods__", ()))
            return f"{actual}, which lacks {', '.join(lacking)}"
        return None

    def usable(self) -> Iterator[tuple[str, T]]:
        """Everything that loads and is of the right type, with its name, in the order of registration.

        What isn't costs one warning and is passed over from then on; its reason is in :attr:`broken`.

        Raises:
            PluginError: a built-in doesn't load.
        """
        for name in list(self):
            if name in self._broken:
                continue
            try:
                thing = self.get(name)
            except PluginError as error:
                if self._entries[name].owner == BUILTIN:
                    raise
                self._broken[name] = "; ".join(filter(None, (error.what, error.why)))
                self.warn(name, self._broken[name])
                continue
            yield name, thing

    def reject(self, name: str, problem: str) -> None:
        """A loaded thing turns out to be unusable: :meth:`usable` passes it over from now on. Warns once.

        Args:
            name: of the thing.
            problem: goes on after its name: ``"has no order"``.
        """
        self._broken[name] = f"{self.kind} {name!r} of {self._entries[name].by} {problem}"
        self.warn(name, self._broken[name])

    def warn(self, name: str, text: str) -> None:
        """One warning about ``name``, however often something is wrong with it."""
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"{text}: it is left out", stacklevel=3)

    @property
    def broken(self) -> Mapping[str, str]:
        """Names that :meth:`usable` passes over, with the reason."""
        return MappingProxyType(self._broken)

    @property
    def contested(self) -> Mapping[str, tuple[RegistryEntry, ...]]:
        """Names of this table that several registered, with all their entries."""
        return {name: self.claimed(name) for name in self._entries if name in self._contested}

    def _is_contested(self, name: str) -> bool:
        return name in self._contested and name in self._entries  # the table beside has names of its own

    def entry(self, name: str) -> RegistryEntry:
        """The registration itself, importing nothing. Raises PluginError if the name is contested."""
        if self._is_contested(name):
            raise self.collision(name=name)
        return self._entries[name]

    def entries(self, plugin: str, owner: str) -> list[RegistryEntry]:
        """What a plugin registered, contested names too."""
        claims = (entry for name in self._entries for kind, entry in self._claims.get(name, ())
                  if kind == self.kind)
        return [entry for entry in claims if (entry.plugin, entry.owner) == (plugin, owner)]

    def disputes(self, plugin: str, owner: str) -> list[PluginError]:
        """Of each name of a plugin's that is contested, who contest it."""
        return [self.collision(name=entry.name) for entry in self.entries(plugin, owner)
                if self._is_contested(entry.name)]

    def drop_owner(self, owner: str) -> None:
        """Forget everything that ``owner`` registered."""
        for name in [name for name, entry in self._entries.items()
                     if owner in (entry.owner, *(claim.owner for claim in self.claimed(name)))]:
            self._claims[name] = [(kind, entry) for kind, entry in self._claims.get(name, ())
                                  if (kind, entry.owner) != (self.kind, owner)]
            if len(self._claims[name]) < 2:
                self._contested.discard(name)
            rest = [entry for kind, entry in self._claims[name] if kind == self.kind]
            self._entries = {**self._entries, name: rest[0]} if rest else {
                key: entry for key, entry in self._entries.items() if key != name}
            self._loaded.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._entries if name not in self._contested])

    def __contains__(self, name: object) -> bool:
        """Whether it can be asked for; a contested name can, and :meth:`get` says who contest it."""
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)


def load_target(target: object, whose: str, plugin: str = "") -> Any:
    """Import ``"module:attr"``; any other object is returned as it is.

    Args:
        target: what was registered.
        whose: kind, name and distribution, for messages.
        plugin: whose check is suggested when it fails.

    Raises:
        PluginError: importing it raises anything at all, or the module has no such attribute.
    """
    if not isinstance(target, str):
        return target
    module, attr = target.split(":")
    try:
        return getattr(importlib.import_module(module), attr)
    except BaseException as error:  # a stranger's module may raise what it likes, SystemExit too
        if is_ctrl_c(error):
            raise
        raise PluginError(f"{whose} can't be loaded from {target!r}", why=described(error),
                          next=_check(plugin)) from error


def is_ctrl_c(error: BaseException) -> bool:
    """Whether somebody pressed Ctrl-C. A stranger's code may raise KeyboardInterrupt itself; the innermost
    frame has then stopped at a ``raise``, where no signal is ever handled. The standard library's own raise
    is an answer to the signal: that of ``asyncio.run``."""
    following: BaseException | None = error
    seen: list[BaseException] = []  # a stranger can also make a circle of causes
    while following is not None and not any(following is other for other in seen):
        if isinstance(following, KeyboardInterrupt):
            place = following.__traceback__
            while place is not None and place.tb_next is not None:
                place = place.tb_next
            if place is None or place.tb_frame.f_code.co_code[place.tb_lasti] != _RAISE:
                return True
            module = str(place.tb_frame.f_globals.get("__name__"))
            if module.partition(".")[0] in sys.stdlib_module_names:
                return True
        seen.append(following)
        following = following.__cause__ or following.__context__
    return False


def a_type(thing: object) -> str:
    """``a float``, ``an int``."""
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def described(error: BaseException) -> str:
    """An exception in one line: what it says, and its type unless it is one of ours. Whatever a stranger's
    exception does when it is turned to text, this one raises nothing."""
    try:
        if isinstance(error, QuantkitError):
            return " ".join("; ".join(filter(None, (error.what, error.why, error.next))).split())
        text = " ".join(str(error).split())
    except BaseException as other:  # its __str__ is a stranger's code, too
        if is_ctrl_c(other):
            raise
        text = f"its text can't be had, which raises {type(other).__name__}"
    return ": ".join(filter(None, (type(error).__name__, text)))[:1000]


def _name_of(thing: Any) -> str:
    """``thing.name``, as Python writes it; or why it has none."""
    try:
        return repr(thing.name)[:100]
    except Exception as error:  # the attribute may be a property, which runs a stranger's code
        return f"that can't be read: {described(error)}"


def _check(plugin: str) -> str | None:
    return f"quantkit plugins check {plugin}" if plugin and plugin != BUILTIN else None
