"""The plugin manager: finds plugins by entry point and fills the registries through their hooks."""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pluggy

from quantkit import hookspecs
from quantkit.errors import PluginError, did_you_mean
from quantkit.registry import Registry

ENTRY_POINTS = "quantkit"
BUILTIN = "quantkit"

# kind (as in the hook's name) → (singular for messages, required type)
KINDS: dict[str, tuple[str, str | None]] = {
    "sources": ("source", "quantkit.sources.base:SourceKind"),
    "architectures": ("architecture", "quantkit.models.architecture:Architecture"),
    "methods": ("method", "quantkit.methods.base:Method"),
    "transforms": ("transform", "quantkit.transforms.base:Transform"),
    "formats": ("format", "quantkit.formats.base:Format"),
    "kernels": ("kernel", "quantkit.ops.dispatch:LinearKernel"),
    "kv_policies": ("KV policy", None),
    "kv_codecs": ("KV codec", None),
    "metrics": ("metric", None),
    "reporters": ("reporter", None),
    "commands": ("command", "click:Command"),
}


@dataclass(frozen=True)
class PluginInfo:
    """One plugin as ``quantkit plugins list`` shows it."""

    name: str
    distribution: str
    version: str
    error: str | None = None


def whose(kind: str, name: str) -> str:
    """A registered thing for messages: ``method 'hqq' of quantkit-hqq``; without its distribution if it isn't
    registered."""
    table = registry(kind)
    owner = f" of {table.entry(name).owner}" if name in table else ""
    return f"{KINDS[kind][0]} {name!r}{owner}"


def is_builtin(kind: str, name: str) -> bool:
    """Whether the thing called ``name`` is quantkit's own."""
    table = registry(kind)
    return name in table and table.entry(name).owner == BUILTIN


class PluginManager:
    """Loads the built-ins, then every wanted entry point, through one and the same set of hooks.

    Args:
        only: entry-point names to load; ``None`` loads all, an empty collection loads none.
    """

    def __init__(self, only: Iterable[str] | None = None) -> None:
        from quantkit import __version__, builtin

        self._pluggy = pluggy.PluginManager("quantkit")
        self._pluggy.add_hookspecs(hookspecs)
        self.registries: dict[str, Registry[Any]] = {
            kind: Registry(singular, expects) for kind, (singular, expects) in KINDS.items()}
        self.plugins: list[PluginInfo] = []
        self.add(builtin, BUILTIN, version=__version__)
        wanted = None if only is None else set(only)
        names = set()
        for point in sorted(importlib.metadata.entry_points(group=ENTRY_POINTS), key=lambda p: p.name):
            names.add(point.name)
            if wanted is None or point.name in wanted:
                self._load(point)
        for missing in sorted((wanted or set()) - names):
            raise PluginError(f"QUANTKIT_PLUGINS names {missing!r}, which is not installed",
                              why=did_you_mean(missing, names), next="quantkit plugins list")

    def _load(self, point: importlib.metadata.EntryPoint) -> None:
        dist = point.dist.name if point.dist else point.module
        version = point.dist.version if point.dist else "unknown"
        try:
            plugin = point.load()
        except Exception as error:  # a stranger's import may raise anything; it costs only itself
            self._broken(point.name, dist, version, error)
            return
        self.add(plugin, dist, name=point.name, version=version)

    def _broken(self, name: str, dist: str, version: str, error: Exception) -> None:
        reason = f"{type(error).__name__}: {error}"
        warnings.warn(f"plugin {name!r} of {dist} {version} was left out: {reason}", stacklevel=3)
        self.plugins.append(PluginInfo(name, dist, version, reason))

    def add(self, plugin: object, distribution: str, *, name: str | None = None,
            version: str = "unknown") -> None:
        """Register a plugin object (usually a module) on behalf of a distribution.

        Raises:
            PluginError: a misspelled hook, a wrong signature, or a name already taken.
        """
        name = name or distribution
        self._check_spelling(plugin, distribution)
        try:
            self._pluggy.register(plugin, name=f"{distribution}:{name}")
            self._pluggy.check_pending()
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError(f"plugin {name!r} of {distribution} doesn't fit quantkit's hooks",
                              why=str(error).strip(), next=f"pip install --upgrade {distribution}") from error
        for kind, registry in self.registries.items():
            for impl in self._impls(f"register_{kind}", plugin):
                register = functools.partial(registry.register, owner=distribution)
                try:
                    impl.function(*[register for _ in impl.argnames])
                except PluginError:
                    raise
                except Exception as error:  # as for an import: it costs only itself
                    for filled in self.registries.values():
                        filled.drop_owner(distribution)
                    self._pluggy.unregister(plugin)
                    self._broken(name, distribution, version, error)
                    return
        self.plugins.append(PluginInfo(name, distribution, version))

    def _check_spelling(self, plugin: object, distribution: str) -> None:
        known = [n for n, f in inspect.getmembers(hookspecs, inspect.isfunction)
                 if hasattr(f, "quantkit_spec")]
        for attr in dir(plugin):
            marked = hasattr(getattr(plugin, attr, None), "quantkit_impl")
            if marked and attr not in known:
                raise PluginError(f"{distribution} implements a hook {attr!r} that doesn't exist "
                                  f"in {BUILTIN}", why=did_you_mean(attr, known))

    def _impls(self, hook: str, plugin: object) -> list[Any]:
        return [i for i in getattr(self._pluggy.hook, hook).get_hookimpls() if i.plugin is plugin]

    def dirs(self, hook: str) -> list[tuple[str, Path]]:
        """Folders given by ``recipe_dirs`` or ``eval_dirs``, each with its distribution's name."""
        return [(impl.plugin_name.split(":")[0], Path(folder))
                for impl in getattr(self._pluggy.hook, hook).get_hookimpls()
                for folder in impl.function()]

    def notify(self, hook: str, **facts: Any) -> None:
        """Tell observers. An observer that raises costs one warning, never the run."""
        for impl in getattr(self._pluggy.hook, hook).get_hookimpls():
            try:
                impl.function(*[facts[n] for n in impl.argnames])
            except Exception as error:
                warnings.warn(f"{impl.plugin_name} failed in {hook}: {error}", stacklevel=2)


@functools.cache
def current() -> PluginManager:
    """The process's manager, made on first use. ``QUANTKIT_PLUGINS=a,b`` loads only those plugins."""
    value = os.environ.get("QUANTKIT_PLUGINS")
    only = None if value is None else [n.strip() for n in value.split(",") if n.strip()]
    return PluginManager(only)


def registry(kind: str) -> Registry[Any]:
    """The current registry of ``methods``, ``formats``, ``kernels``, …"""
    return current().registries[kind]
