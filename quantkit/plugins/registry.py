"""Tables of names whose targets are imported lazily.

A thing is registered as an object or as ``"module:attr"``, which is imported the first time that somebody
asks for it. Listing names imports nothing.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from quantkit.support.errors import PluginError, QuantkitError, UsageError, did_you_mean

T = TypeVar("T")
BUILTIN = "quantkit"
"""The distribution whose names can't be taken."""
FAILURES = (Exception, SystemExit)
"""What a plugin's code may raise at the cost of that plugin alone. An interrupt is the user's."""
SPELLING = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Names that a recipe, a command line and ``--kv`` can spell."""
_NO_STRING = re.compile(r"(?i:null|true|false)|0x[0-9A-Fa-f]+|0o[0-7]+|[0-9]+(\.[0-9]*)?([eE]-?[0-9]+)?")
"""Of those, the ones that YAML reads as something other than a string."""
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")

FIRST_PARTY: dict[str, dict[str, str]] = {
    "recipe": {"int4-hqq": "quantkit-hqq", "int4-imatrix": "quantkit-imatrix",
               "trellis2-distill": "quantkit-recover"},
    "recovery": {"distill": "quantkit-recover"},
    "method": {"hqq": "quantkit-hqq", "imatrix": "quantkit-imatrix"},
    "KV policy": {"keydiff": "quantkit-keydiff"},
    "KV codec": {"int6": "quantkit-int6kv"},
    "metric": {"ece": "quantkit-ece"},
    "reporter": {"csv": "quantkit-csv"},
}
"""Kind → name → the distribution in ``plugins/`` of the repository that registers it."""


@dataclass(frozen=True)
class RegistryEntry:
    """One registration. Raises PluginError if nobody can spell its name, or a text isn't ``"module:attr"``.

    Attributes:
        kind: the kind of thing, as messages say it: ``"KV codec"``.
        name: the name by which it is asked for.
        target: the thing itself, or the place where it is, ``"module:attr"``.
        owner: the distribution that registered it.
        about: further facts that the owner gives about the target.
        plugin: the name of the owner's entry point; empty if it wasn't loaded from one.
        version: the version of the distribution, if it is known.
    """

    kind: str
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

    def __post_init__(self) -> None:
        what = f"{self.kind} {self.name!r} of {self.by}"
        if not SPELLING.fullmatch(self.name) or _NO_STRING.fullmatch(self.name):
            raise PluginError(f"{what} can't have this name", next="give it another name",
                              why="recipes and command lines spell names [A-Za-z0-9][A-Za-z0-9._-]*, with 64 "
                                  "characters at most, which YAML reads as a text")
        if isinstance(self.target, str) and not _TARGET.fullmatch(self.target):
            raise PluginError(f"{what} has target {self.target!r}",
                              why='a lazy target is written "module:attr"')

    def load(self) -> Any:
        """The thing, imported now if its target is a text. Raises PluginError."""
        return load_target(self.target, f"{self.kind} {self.name!r} of {self.by}", self.plugin)


class Registry(Generic[T]):
    """A table of one kind of thing.

    A built-in's name can't be taken. A name that several others register is contested: the table goes on
    without it, and asking for it is an error.

    Args:
        kind: the kind of thing, for messages: ``"method"``.
        expects: the ``"module:Class"`` that a loaded target must be an instance of.
        subclass: a target must be a concrete subclass of ``expects`` instead.
        named: a thing's ``name`` must be the one under which it is registered.
        beside: another table that shares its names with this one: a user who writes a name doesn't say which
            of the two is meant.
    """

    def __init__(self, kind: str, expects: str | None = None, *, subclass: bool = False,
                 named: bool = False, beside: Registry[Any] | None = None) -> None:
        self.kind = kind
        self._expects = expects
        self._subclass = subclass
        self._named = named
        self._claims: dict[str, list[RegistryEntry]] = {} if beside is None else beside._claims
        self._loaded: dict[str, T] = {}
        self._broken: dict[str, str] = {}
        self._warned: set[str] = set()

    def register(self, name: str, target: object, *, owner: str, **details: Any) -> None:
        """Add a :class:`RegistryEntry` of these fields; the name may be taken."""
        self.add(RegistryEntry(self.kind, name, target, owner, **details))

    def add(self, entry: RegistryEntry) -> None:
        """Add a registration."""
        self._claims.setdefault(entry.name, []).append(entry)
        self._loaded.pop(entry.name, None)

    def _claims_to(self, name: object) -> list[RegistryEntry]:
        """Who claims a name that can be asked for here; a built-in's name has that one claim."""
        claims = self._claims.get(name, []) if isinstance(name, str) else []
        claims = claims[:1] if claims and claims[0].owner == BUILTIN else claims
        return claims if any(claim.kind == self.kind for claim in claims) else []

    def collision(self, name: str) -> PluginError:
        """The error that says who claims ``name``."""
        claims = self._claims[name]
        owners = [claim.owner for claim in claims]
        several_kinds = len({claim.kind for claim in claims}) > 1
        by = [f"{f'as {claim.kind} ' if several_kinds else ''}by "
              f"{claim.owner if owners.count(claim.owner) == 1 else claim.by}" for claim in claims]
        then = "register it under another name" if owners[0] == BUILTIN else (
            f"uninstall one, or leave one out by naming the others in QUANTKIT_PLUGINS: "
            f"pip uninstall {owners[-1]}")
        times = "twice" if len(claims) == 2 else f"{len(claims)} times"
        return PluginError(f"{self.kind} {name!r} is registered {times}, {', '.join(by[:-1])} and {by[-1]}",
                           why="a name means one thing; neither wins silently", next=then)

    def collisions(self, plugin: str, owner: str) -> list[PluginError]:
        """An error for each name of a plugin's that isn't its own, or not its alone."""
        return [self.collision(name) for name, claims in self._claims.items() if len(claims) > 1 and any(
            claim.kind == self.kind and (claim.plugin, claim.owner) == (plugin, owner) for claim in claims)]

    def entry(self, name: str) -> RegistryEntry:
        """The registration itself, importing nothing. Raises PluginError if the name is contested, KeyError
        if there is none."""
        claims = self._claims_to(name)
        if not claims:
            raise KeyError(name)
        if len(claims) > 1:
            raise self.collision(name)
        return claims[0]

    def entries(self, plugin: str, owner: str) -> list[RegistryEntry]:
        """The registrations of a plugin, contested names too."""
        return [claim for name in self._claims for claim in self._claims_to(name)
                if claim.kind == self.kind and (claim.plugin, claim.owner) == (plugin, owner)]

    def get(self, name: str) -> T:
        """The thing called ``name``, imported now if needed.

        Raises:
            UsageError: no such name; the nearest is suggested.
            PluginError: several plugins registered the name, its module fails to import, it is of the wrong
                type or has another name.
        """
        if name not in self:
            why, then = explain_absent(self.kind, name) or (did_you_mean(name, self), "quantkit plugins list")
            raise UsageError(f"no {self.kind} is called {name!r}", why=why, next=then)
        entry = self.entry(name)
        if name in self._loaded:
            return self._loaded[name]
        thing: T = entry.load()
        whose, check = f"{self.kind} {name!r} of {entry.by}", _check_command(entry.plugin)
        if self._expects and (problem := self._misfit(thing, load_target(self._expects, self.kind))):
            raise PluginError(f"{whose} is {problem}", next=check,
                              why=f"it must be a {'subclass of ' if self._subclass else ''}"
                                  f"{self._expects.replace(':', '.')}")
        if self._named and (named := getattr(thing, "name", None)) != name:
            raise PluginError(f"{whose} has name {named!r}", next=check,
                              why="a thing has the name under which it is registered")
        self._loaded[name] = thing
        return thing

    def _misfit(self, thing: Any, expected: type) -> str | None:
        """What a thing is instead of what is expected; ``None`` if it fits."""
        is_class = isinstance(thing, type)
        actual = f"the class {thing.__name__}" if is_class else a_type(thing)
        if not self._subclass:
            return None if isinstance(thing, expected) and not is_class else actual
        if not (is_class and issubclass(thing, expected)):
            return actual
        if inspect.isabstract(thing):
            return f"{actual}, which lacks {', '.join(sorted(thing.__abstractmethods__))}"
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
                if self.entry(name).owner == BUILTIN:
                    raise
                self._broken[name] = "; ".join(filter(None, (error.what, error.why)))
                self.warn(name, self._broken[name])
                continue
            yield name, thing

    def reject(self, name: str, problem: str) -> None:
        """Have :meth:`usable` pass over a loaded thing that turns out to be unusable. Warns once.

        Args:
            name: the thing's name.
            problem: the sentence that goes on after its name: ``"has no order"``.
        """
        self._broken[name] = f"{self.kind} {name!r} of {self.entry(name).by} {problem}"
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

    def drop_owner(self, owner: str) -> None:
        """Forget everything that ``owner`` registered."""
        for name, claims in self._claims.items():
            self._claims[name] = [claim for claim in claims
                                  if (claim.kind, claim.owner) != (self.kind, owner)]
            self._loaded.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._claims if len(self._claims_to(name)) == 1])

    def __contains__(self, name: object) -> bool:
        """Whether it can be asked for; a contested name can, and :meth:`get` says who contest it."""
        return bool(self._claims_to(name))


def load_target(target: object, whose: str, plugin: str = "") -> Any:
    """Import ``"module:attr"``; any other object is returned as it is.

    Args:
        target: the object or text that was registered.
        whose: kind, name and distribution, for messages.
        plugin: the plugin whose check is suggested when it fails.

    Raises:
        PluginError: importing it raises anything, or the module has no such attribute.
    """
    if not isinstance(target, str):
        return target
    module, _, attr = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attr)
    except FAILURES as error:
        raise PluginError(f"{whose} can't be loaded from {target!r}", why=described(error),
                          next=_check_command(plugin)) from error


def explain_absent(kind: str, name: str) -> tuple[str, str] | None:
    """Why a name of a plugin in ``plugins/`` isn't registered, and the next command; ``None`` if none of them
    has that name."""
    distribution = FIRST_PARTY.get(kind, {}).get(name)
    if distribution is None:
        return None
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return (f"it belongs to the plugin {distribution}, which isn't installed",
                f"pip install plugins/{distribution}")
    return (f"it belongs to the plugin {distribution}, which is installed but not loaded",
            f"add {distribution.removeprefix('quantkit-')} to QUANTKIT_PLUGINS, or see what is wrong: "
            "quantkit plugins list")


def a_type(thing: object) -> str:
    """``a float``, ``an int``."""
    name = type(thing).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def described(error: BaseException) -> str:
    """An exception in one line: what it says, and its type unless it is one of ours."""
    if isinstance(error, QuantkitError):
        return " ".join("; ".join(filter(None, (error.what, error.why, error.next))).split())
    return ": ".join(filter(None, (type(error).__name__, " ".join(str(error).split()))))[:1000]


def _check_command(plugin: str) -> str | None:
    return f"quantkit plugins check {plugin}" if plugin and plugin != BUILTIN else None
