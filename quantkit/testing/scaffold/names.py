"""A plugin's names: what it is called on PyPI, as a package, in a recipe and as a class."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from typing import Any

from quantkit.evaluation.keys import key_problem
from quantkit.plugins import first_party
from quantkit.plugins.manager import PluginManager
from quantkit.plugins.registry import Registry, RegistryEntry
from quantkit.support.errors import PluginError, UsageError, did_you_mean
from quantkit.testing.scaffold.kinds import TemplateKind

PREFIX = "quantkit-"
LONGEST = 24
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")


@dataclass(frozen=True)
class PluginNames:
    """One name in all its spellings.

    Attributes:
        name: with hyphens: ``my-method``; the entry point's name, too.
        distribution: ``quantkit-my-method``.
        package: ``quantkit_my_method``.
        class_name: ``MyMethod``.
        registered: as quantkit will know it: ``my-method``, or ``my_method`` of kinds that are written so.
    """

    name: str
    distribution: str
    package: str
    class_name: str
    registered: str


def plugin_names(text: str, kind: TemplateKind) -> PluginNames:
    """Spell a name that a user gave: ``my-method``, ``my_method`` or ``quantkit-my-method``.

    Raises:
        UsageError: it can't be a distribution's, a package's and a class's name.
    """
    name = text.replace("_", "-").removeprefix(PREFIX)
    if not _NAME.fullmatch(name) or len(name) > LONGEST:
        raise UsageError(f"a plugin can't be called {text[:100]!r}",
                         why=f"a name has at most {LONGEST} small letters, digits and single hyphens, "
                             "and begins with a letter",
                         next=f"quantkit plugins new my-{kind.name} --kind {kind.name}")
    class_name = "".join(part.capitalize() for part in name.split("-"))
    package = f"{PREFIX}{name}".replace("-", "_")
    if keyword.iskeyword(class_name) or keyword.iskeyword(name):
        raise UsageError(f"a plugin can't be called {name!r}", why="it is a keyword of Python",
                         next=f"quantkit plugins new my-{name} --kind {kind.name}")
    registered = name.replace("-", "_") if kind.underscores else name
    return PluginNames(name, PREFIX + name, package, class_name, registered)


def require_free(names: PluginNames, kind: TemplateKind, manager: PluginManager) -> None:
    """Look whether a plugin of this name could be used.

    Raises:
        UsageError: the distribution is installed or one of quantkit's own, somebody has registered the name,
            or quantkit would refuse it.
    """
    if names.distribution in {plugin.distribution for plugin in manager.plugins}:
        raise UsageError(f"{names.distribution} is installed already", why="a name means one thing",
                         next=f"quantkit plugins check {names.distribution}")
    if (problem := _problem(names, kind, manager)) is not None:
        raise UsageError(f"a {kind.name} can't be called {names.name!r}", why=problem,
                         next=_other(names, kind))
    for registry in _namespace(kind):
        table = manager.registries[registry]
        if names.registered in table:
            owner = table.entry(names.registered).owner
            raise UsageError(f"{table.kind} {names.registered!r} exists already, in {owner}",
                             why="a name means one thing", next=_other(names, kind))
    for owner, stem in _files(kind, manager):
        if stem == names.registered:
            raise UsageError(f"{kind.name} {stem!r} exists already, in {owner}", why="a name means one thing",
                             next=_other(names, kind))


def _problem(names: PluginNames, kind: TemplateKind, manager: PluginManager) -> str | None:
    """Why quantkit would refuse what is registered by a name, whoever has it; ``None``: it wouldn't."""
    owners = {name: distribution for group in [manager.registries[kind].kind for kind in _namespace(kind)]
              or [kind.name] for name, distribution in first_party.NAMES.get(group, {}).items()}
    if names.registered in owners:
        return f"it is a name of {owners[names.registered]}"
    if names.distribution in {name for group in first_party.NAMES.values() for name in group.values()}:
        return f"{names.distribution} is a plugin of quantkit's own"
    table: Registry[Any] = manager.registries[kind.registry] if kind.registry else Registry(kind.name)
    try:
        table.check(RegistryEntry(names.registered, f"{names.package}:NAME", names.distribution))
    except PluginError as error:
        return error.why
    if kind.name == "metric":
        return key_problem(names.registered)
    if kind.name == "codec":
        from quantkit.kv.base import KERNEL_NAMES  # imports torch

        if names.registered in KERNEL_NAMES:
            return "kernels know a built-in codec by that name, and would read other bytes"
    return None


def _namespace(kind: TemplateKind) -> tuple[str, ...]:
    """Registries in which a kind's name must be free: ``--kv`` takes policies and codecs alike."""
    if kind.registry in ("kv_policies", "kv_codecs"):
        return "kv_policies", "kv_codecs"
    return (kind.registry,) if kind.registry else ()


def _files(kind: TemplateKind, manager: PluginManager) -> list[tuple[str, str]]:
    if kind.registry is not None:
        return []
    hook = {"recipe": "recipe_dirs", "suite": "eval_dirs"}[kind.name]
    return [(owner, path.stem) for owner, folder in manager.dirs(hook)
            for path in sorted(folder.glob("*.yaml"))]


def _other(names: PluginNames, kind: TemplateKind) -> str:
    return f"quantkit plugins new my-{names.name} --kind {kind.name}"


def kind_of(name: str, kinds: dict[str, TemplateKind]) -> TemplateKind:
    """Find a kind. Raises UsageError with the nearest one."""
    if name not in kinds:
        raise UsageError(f"no kind of plugin is called {name!r}", why=did_you_mean(name, kinds),
                         next="quantkit plugins new --help")
    return kinds[name]
