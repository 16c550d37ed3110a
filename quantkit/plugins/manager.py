"""The plugin manager: finds plugins by entry point and fills the registries through their hooks.

A plugin that fails while it is loaded costs one warning and what it would have registered. A name that is
taken costs the later plugin that name only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import inspect
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pluggy

from quantkit.plugins import hooks
from quantkit.plugins.hooks import API_VERSION, OLDEST_API_VERSION
from quantkit.plugins.registry import BUILTIN, FAILURES, Registry, RegistryEntry, a_type, described
from quantkit.support.errors import PluginError, did_you_mean

ENTRY_POINTS = "quantkit"
"""The group of entry points."""
HOOKS = tuple(name for name, function in inspect.getmembers(hooks, inspect.isfunction)
              if hasattr(function, "quantkit_spec"))


def _registries() -> dict[str, Registry[Any]]:
    """Empty tables; the hook ``register_<key>`` fills each."""
    tables: dict[str, Registry[Any]] = {}
    for key, kind in hooks.REGISTRIES.items():
        tables[key] = Registry(kind.noun, kind.expects, **kind.rules, beside=tables.get(kind.beside))
    return tables


@dataclass(frozen=True)
class PluginInfo:
    """One plugin as ``quantkit plugins list`` shows it.

    Attributes:
        name: the name of its entry point.
        distribution, version: the distribution that brings it.
        error: why it was left out; ``None`` if it wasn't.
        module: the module that has its hooks.
        file: the file of that module, if it is known.
        api: the version of the hooks that it was written for, if it is known.
    """

    name: str
    distribution: str
    version: str
    error: str | None = None
    module: str = ""
    file: str | None = None
    api: int | None = None

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution} {self.version}"


class PluginManager:
    """Loads the built-ins, then every wanted entry point, through one and the same set of hooks.

    Args:
        only: entry-point names to load; ``None`` loads all, an empty collection loads none.

    Raises:
        PluginError: ``only`` names something that isn't installed.
    """

    def __init__(self, only: Iterable[str] | None = None) -> None:
        from quantkit import __version__
        from quantkit.plugins import builtin

        self._pluggy = pluggy.PluginManager("quantkit")
        self._pluggy.add_hookspecs(hooks)
        self.registries = _registries()
        self.plugins: list[PluginInfo] = []
        self._warned: set[str] = set()
        self.add(builtin, BUILTIN, version=__version__)
        wanted = None if only is None else set(only)
        points = [] if wanted == set() else sorted(self._entry_points(), key=lambda point: point.name)
        for point in points:
            if wanted is None or point.name in wanted:
                self._load(point)
        names = {point.name for point in points}
        for missing in sorted((wanted or set()) - names):
            raise PluginError(f"QUANTKIT_PLUGINS names {missing!r}, which is not installed",
                              why=did_you_mean(missing, names),
                              next="env -u QUANTKIT_PLUGINS quantkit plugins list")

    def _entry_points(self) -> Iterable[importlib.metadata.EntryPoint]:
        try:
            return importlib.metadata.entry_points(group=ENTRY_POINTS)
        except Exception:  # one file that can't be parsed hides the entry points of all distributions
            return list(self._readable_entry_points())

    def _readable_entry_points(self) -> Iterator[importlib.metadata.EntryPoint]:
        """The entry points of each distribution whose file of them can be parsed, and a warning of others."""
        names = set()
        for dist in importlib.metadata.distributions():
            try:
                if (name := dist.name) in names:
                    continue
                points = [point for point in dist.entry_points if point.group == ENTRY_POINTS]
            except Exception as error:
                where = getattr(dist, "_path", "a distribution")
                self._warn(f"entry points of {where} can't be read: {described(error)}")
                continue
            names.add(name)
            yield from points

    def _load(self, point: importlib.metadata.EntryPoint) -> None:
        """Load an entry point. Whatever goes wrong costs one warning."""
        module = point.value.partition(":")[0]
        name, version = (point.dist.name, point.dist.version) if point.dist else (module, "unknown")
        info = PluginInfo(point.name, name, version, module=module)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for the command's data
                self._add(point.load(), info)
        except FAILURES as error:
            reason = described(error)
            if isinstance(error, ImportError) and str(error.name).partition(".")[0] == BUILTIN:
                reason += f"; it may be for another quantkit: pip install --upgrade {name}"
            self._warn(f"{info} was left out: {reason}")
            self.plugins.append(replace(info, error=reason, file=module_file(module)))

    def add(self, plugin: object, distribution: str, *, name: str | None = None,
            version: str = "unknown") -> None:
        """Register a plugin object (usually a module) on behalf of a distribution.

        Raises:
            PluginError: nothing in it is marked as a hook; a misspelled hook, a wrong signature, a hook that
                raises; another API version; a malformed name. Nothing of it is registered then.
        """
        module = getattr(plugin, "__name__", None) or type(plugin).__module__
        info = PluginInfo(name or distribution, distribution, version, module=module)
        try:
            self._add(plugin, info)
        except PluginError as error:
            raise PluginError(f"plugin {info.name!r} of {distribution} {error.what}", why=error.why,
                              next=error.next) from error

    def _add(self, plugin: object, info: PluginInfo) -> None:
        """Register a plugin, and warn of the names that others have. Raises PluginError with a message that
        goes on after the plugin's name; nothing is registered then."""
        info = replace(info, api=_checked_api(plugin, info.distribution),
                       file=getattr(plugin, "__file__", None) or module_file(info.module))
        _check_hooks(plugin)
        try:
            self._pluggy.register(plugin, name=_key(info))
        except (pluggy.PluginValidationError, ValueError) as error:
            raise PluginError("doesn't fit quantkit's hooks", why=str(error).strip().splitlines()[-1],
                              next=f"pip install --upgrade {info.distribution}") from error
        entries: list[tuple[Registry[Any], RegistryEntry]] = []
        for kind, table in self.registries.items():
            for impl in self._implementations(f"register_{kind}", info):
                register = functools.partial(_collect, entries, table, info)
                try:
                    impl.function(*[register for _ in impl.argnames])
                except FAILURES as error:
                    self._pluggy.unregister(plugin)
                    if isinstance(error, PluginError):
                        raise
                    raise PluginError(f"fails in its hook register_{kind}", why=described(error)) from error
        for table, entry in entries:
            table.add(entry)
        self.plugins.append(info)
        if taken := self.collisions(info):
            self._warn(f"of {info} not all can be used: {'; '.join(error.what for error in taken)}")

    def collisions(self, info: PluginInfo) -> list[PluginError]:
        """An error for each name of a plugin's that others have registered too, so that it can't be used."""
        if info.distribution == BUILTIN:
            return []
        errors = [error for table in self.registries.values()
                  for error in table.collisions(info.name, info.distribution)]
        return list({error.what: error for error in errors}.values())

    def _implementations(self, hook: str, info: PluginInfo) -> list[pluggy.HookImpl]:
        return [impl for impl in getattr(self._pluggy.hook, hook).get_hookimpls()
                if impl.plugin_name == _key(info)]

    def folders(self, hook: str) -> Iterator[tuple[PluginInfo, Path]]:
        """Folders given by ``recipe_dirs`` or ``eval_dirs``. A hook that raises, or gives what is no list of
        folders, costs one warning and only what is wrong."""
        for info in list(self.plugins):
            for impl in self._implementations(hook, info):
                try:
                    if not isinstance(folders := impl.function(), list | tuple):
                        raise TypeError(f"it returned {a_type(folders)}, not a list of folders")
                    paths = [Path(folder) for folder in folders]
                except FAILURES as error:
                    self._warn(f"{hook} of {info} failed: {described(error)}")
                    continue
                for path in paths:
                    if path.is_absolute() and path.is_dir():
                        yield info, path
                    else:
                        self._warn(f"{hook} of {info}: {str(path)!r} is not the absolute path of a folder")

    def files(self, hook: str, below: str = ".") -> list[tuple[PluginInfo, Path]]:
        """The YAML files in :meth:`folders`, which are named by their stems, each with its plugin. A plugin's
        file that has a built-in's name costs a warning and is left out; those of several plugins all stay.

        Args:
            hook: the hook that names the folders.
            below: the place in each folder.
        """
        files = [(info, path) for info, folder in self.folders(hook)
                 for path in sorted((folder / below).glob("*.yaml"))]
        builtin = {path.stem for info, path in files if info.distribution == BUILTIN}
        taken = [(info, path) for info, path in files
                 if info.distribution != BUILTIN and path.stem in builtin]
        for info, path in taken:
            warnings.warn(f"{path} of {info.distribution} is left out: {path.stem!r} is a name of quantkit's "
                          "own", stacklevel=2)
        return [file for file in files if file not in taken]

    def notify(self, hook: str, **facts: Any) -> None:
        """Tell observers. An observer that raises costs one warning, never the run."""
        for info in self.plugins:
            for impl in self._implementations(hook, info):
                try:
                    impl.function(*[facts[name] for name in impl.argnames])
                except FAILURES as error:
                    self._warn(f"{info.distribution}:{info.name} failed in {hook}: {described(error)}",
                               key=f"{_key(info)} {hook}")

    def observed(self, info: PluginInfo) -> list[str]:
        """The observers that a plugin implements."""
        return [hook for hook in HOOKS if hook.startswith("on_") and self._implementations(hook, info)]

    def _warn(self, text: str, key: str | None = None) -> None:
        """Warn once for each text, or for each ``key``."""
        if (key or text) not in self._warned:
            self._warned.add(key or text)
            warnings.warn(text, stacklevel=3)


def _key(info: PluginInfo) -> str:
    """The name by which pluggy knows a plugin."""
    return f"{info.distribution}:{info.name}"


def _checked_api(plugin: object, distribution: str) -> int:
    """The version of the hooks that a plugin was written for. Raises PluginError if this quantkit doesn't
    offer it."""
    version: Any = getattr(plugin, "QUANTKIT_API", 1)
    if version in range(OLDEST_API_VERSION, API_VERSION + 1):
        return int(version)
    old = isinstance(version, int) and version < OLDEST_API_VERSION
    raise PluginError(f"is for version {version!r} of the plugin API",
                      why=f"this quantkit offers {OLDEST_API_VERSION} to {API_VERSION}",
                      next=f"pip install --upgrade {distribution}" if old
                      else "run pip install . in a newer checkout of quantkit")


def _check_hooks(plugin: object) -> None:
    """Raise PluginError if nothing is marked with ``@hookimpl``, or something that is no hook."""
    marked = [name for name in dir(plugin) if hasattr(getattr(plugin, name, None), "quantkit_impl")]
    if not marked:
        unmarked = [name for name in HOOKS if callable(getattr(plugin, name, None))]
        raise PluginError("marks no function with @hookimpl", next="see docs/plugins.md",
                          why=f"{', '.join(unmarked)} must be marked to be called" if unmarked
                          else "hooks are functions marked with @hookimpl of quantkit.plugins.hooks")
    for name in marked:
        if name not in HOOKS:
            raise PluginError(f"implements a hook {name!r} that doesn't exist in quantkit",
                              why=did_you_mean(name, HOOKS))


def _collect(entries: list[tuple[Registry[Any], RegistryEntry]], table: Registry[Any], info: PluginInfo,
             name: str, target: object, /, **about: Any) -> None:
    """The ``register`` that a hook is given: nothing is in a table before all hooks have returned."""
    entries.append((table, RegistryEntry(table.kind, name, target, info.distribution, MappingProxyType(about),
                                         info.name, "" if info.version == "unknown" else info.version)))


@functools.cache
def current() -> PluginManager:
    """The process's manager, made on first use. ``QUANTKIT_PLUGINS=a,b`` loads only those plugins."""
    value = os.environ.get("QUANTKIT_PLUGINS")
    only = None if value is None else [name.strip() for name in value.split(",") if name.strip()]
    return PluginManager(only)


def registry(kind: str) -> Registry[Any]:
    """The current registry of ``methods``, ``formats``, ``kernels``, …"""
    return current().registries[kind]


def describe_entry(kind: str, name: str) -> str:
    """A registered thing for messages: ``method 'hqq' of quantkit-hqq``; without its distribution if it isn't
    registered."""
    table = registry(kind)
    owner = f" of {table.entry(name).owner}" if name in table else ""
    return f"{table.kind} {name!r}{owner}"


def is_builtin(kind: str, name: str) -> bool:
    """Whether the thing called ``name`` is quantkit's own."""
    table = registry(kind)
    return name in table and table.entry(name).owner == BUILTIN


def module_file(module: str) -> str | None:
    """The file of a module that may not be imported yet; ``None`` if that can't be told without importing."""
    if (loaded := sys.modules.get(module)) is not None:
        return getattr(loaded, "__file__", None)
    parts = module.split(".")
    try:
        spec: ModuleSpec | None = importlib.util.find_spec(parts[0])  # without dots: imports nothing
        for size in range(2, len(parts) + 1):
            if spec is None or spec.submodule_search_locations is None:
                return None
            spec = PathFinder.find_spec(".".join(parts[:size]), spec.submodule_search_locations)
    except (ImportError, ValueError, AttributeError):
        return None
    return spec.origin if spec is not None and spec.has_location else None
