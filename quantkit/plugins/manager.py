"""The plugin manager: finds plugins by entry point and fills the registries through their hooks.

A plugin that fails while it is loaded costs one warning and what it would have registered. A name that is
taken costs the later plugin that name only.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pluggy

from quantkit.plugins import hooks
from quantkit.plugins.checks import HOOKS, Registrations, api_of, check_marks, collect
from quantkit.plugins.code import anothers, belongs, frames, module_file, package_of
from quantkit.plugins.entry_points import distribution_of, entry_points
from quantkit.plugins.registry import BUILTIN, Registry, RegistryEntry, a_type, described, is_ctrl_c
from quantkit.support.errors import PluginError, QuantkitError, did_you_mean

OBSERVERS = tuple(name for name in HOOKS if name.startswith("on_"))


@dataclass(frozen=True)
class PluginKind:
    """What is registered by the hook ``register_<kind>``.

    Attributes:
        singular: for messages.
        expects: the ``"module:Class"`` that a target must be an instance of, or, if ``subclass``, a subclass.
        named: whether a thing's ``name`` must be the registered one.
        beside: another kind that shares its names, as ``--kv`` writes both in the same way.
    """

    singular: str
    expects: str
    subclass: bool = False
    named: bool = False
    beside: str | None = None


KINDS: dict[str, PluginKind] = {
    "sources": PluginKind("source", "quantkit.sources.base:SourceKind"),
    "architectures": PluginKind("architecture", "quantkit.models.architecture:Architecture"),
    "methods": PluginKind("method", "quantkit.quantization.methods.base:Method", named=True),
    "transforms": PluginKind("transform", "quantkit.quantization.transforms.base:Transform", named=True),
    "recoveries": PluginKind("recovery", "quantkit.quantization.recovery:Recovery", named=True),
    "formats": PluginKind("format", "quantkit.formats.base:Format", named=True),
    "kernels": PluginKind("kernel", "quantkit.ops.dispatch:LinearKernel", named=True),
    "kv_policies": PluginKind("KV policy", "quantkit.kv.base:KVPolicy", subclass=True),
    "kv_codecs": PluginKind("KV codec", "quantkit.kv.base:KVCodec", subclass=True, beside="kv_policies"),
    "drafters": PluginKind("drafter", "quantkit.runtime.drafting.base:Drafter", subclass=True),
    "metrics": PluginKind("metric", "quantkit.evaluation.metrics:Metric"),
    "reporters": PluginKind("reporter", "quantkit.evaluation.report.base:Reporter"),
    "commands": PluginKind("command", "click:Command"),
}


@dataclass(frozen=True)
class PluginInfo:
    """One plugin as ``quantkit plugins list`` shows it.

    Attributes:
        name: of its entry point.
        distribution, version: who brings it.
        error: why it was left out; ``None`` if it wasn't.
        refused: what of it is not used though the plugin is, a sentence each.
        module: where its hooks are.
        file: of that module, if it is known.
        api: the version of the hooks that it was written for, if it is known.
    """

    name: str
    distribution: str
    version: str
    error: str | None = None
    refused: tuple[str, ...] = ()
    module: str = ""
    file: str | None = None
    api: int | None = None


def whose(kind: str, name: str) -> str:
    """A registered thing for messages: ``method 'hqq' of quantkit-hqq``; without its distribution if it isn't
    registered."""
    table = registry(kind)
    owner = f" of {table.entry(name).owner}" if name in table else ""
    return f"{KINDS[kind].singular} {name!r}{owner}"


def is_builtin(kind: str, name: str) -> bool:
    """Whether the thing called ``name`` is quantkit's own."""
    table = registry(kind)
    return name in table and table.entry(name).owner == BUILTIN


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
        self.registries: dict[str, Registry[Any]] = {}
        for kind, about in KINDS.items():
            self.registries[kind] = Registry(
                about.singular, about.expects, subclass=about.subclass, named=about.named,
                beside=self.registries[about.beside] if about.beside else None)
        self.plugins: list[PluginInfo] = []
        self._told: set[str] = set()
        self.add(builtin, BUILTIN, version=__version__)
        wanted = None if only is None else set(only)
        names = set()
        for point in () if wanted == set() else sorted(entry_points(), key=lambda point: point.name):
            names.add(point.name)
            if wanted is None or point.name in wanted:
                self._load(point)
        for missing in sorted((wanted or set()) - names):
            raise PluginError(f"QUANTKIT_PLUGINS names {missing!r}, which is not installed",
                              why=did_you_mean(missing, names),
                              next="env -u QUANTKIT_PLUGINS quantkit plugins list")

    def _load(self, point: importlib.metadata.EntryPoint) -> None:
        """Load an entry point. Whatever goes wrong costs one warning."""
        module = str(getattr(point, "value", "")).partition(":")[0].strip()
        info = PluginInfo(point.name, *distribution_of(point, module), module=module)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # stdout is for the command's data
                if isinstance(point, importlib.metadata.EntryPoint) and not point.pattern.match(point.value):
                    raise PluginError(f"has the entry point {point.value!r}",
                                      why='an entry point is written "module" or "module:attr"')
                plugin = point.load()
                info, entries = self._examine(plugin, info)
        except BaseException as error:  # a stranger's module may raise anything, SystemExit too
            if is_ctrl_c(error):
                raise
            reason = _reason(error, info.distribution)
            self._warn(f"plugin {info.name!r} of {info.distribution} {info.version} was left out: {reason}")
            self.plugins.append(replace(info, error=reason, file=module_file(module)))
            return
        refused = []
        for kind, entry in entries:
            table = self.registries[kind]
            others = {other.owner for other in table.claimed(entry.name)}
            if others:
                refused.append(table.collision(entry).what)
            if BUILTIN not in others:
                table.add(entry)
        if refused:
            self._warn(f"of plugin {info.name!r} of {info.distribution} {info.version} not all can be used: "
                       + "; ".join(refused))
        self.plugins.append(replace(info, refused=tuple(refused)))

    def add(self, plugin: object, distribution: str, *, name: str | None = None,
            version: str = "unknown") -> None:
        """Register a plugin object (usually a module) on behalf of a distribution.

        Raises:
            PluginError: nothing in it is marked as a hook; a misspelled hook, a wrong signature, a hook that
                raises; another API version; a name that is malformed or already taken. Nothing of it is
                registered then.
        """
        info = PluginInfo(name or distribution, distribution, version, module=_module_of(plugin))
        try:
            info, entries = self._examine(plugin, info)
        except PluginError as error:
            then = error.next and error.next.replace("{distribution}", distribution)
            raise PluginError(f"plugin {info.name!r} of {distribution} {error.what}", why=error.why,
                              next=then) from error
        for kind, entry in entries:
            if self.registries[kind].claimed(entry.name):
                self._pluggy.unregister(plugin)
                raise self.registries[kind].collision(entry)
        for kind, entry in entries:
            self.registries[kind].add(entry)
        self.plugins.append(info)

    def _examine(self, plugin: object, info: PluginInfo) -> tuple[PluginInfo, Registrations]:
        """Let pluggy know the plugin, and call its hooks for what it registers.

        Raises:
            PluginError: it isn't a plugin as it must be; the message goes on after its name.
        """
        info = replace(info, api=api_of(plugin, info.module), file=getattr(plugin, "__file__", None)
                       or module_file(info.module))
        check_marks(plugin)
        make = functools.partial(RegistryEntry, owner=info.distribution, plugin=info.name,
                                 version="" if info.version == "unknown" else info.version)
        name = f"{info.distribution}:{info.name}"
        try:
            self._pluggy.register(plugin, name=name)
            self._pluggy.check_pending()
            return info, collect(lambda hook: self._impls(hook, plugin), self.registries, make)
        except BaseException as error:
            if self._pluggy.get_plugin(name) is plugin:
                self._pluggy.unregister(plugin)
            if isinstance(error, pluggy.PluginValidationError | ValueError | TypeError):
                raise PluginError("doesn't fit quantkit's hooks", why=str(error).strip().splitlines()[-1],
                                  next="pip install --upgrade {distribution}") from error
            raise

    def _impls(self, hook: str, plugin: object) -> list[pluggy.HookImpl]:
        return [i for i in getattr(self._pluggy.hook, hook).get_hookimpls() if i.plugin is plugin]

    def _all_impls(self, hook: str) -> Iterator[tuple[PluginInfo, pluggy.HookImpl]]:
        """A hook's implementations in the order in which their plugins were loaded."""
        known = {f"{info.distribution}:{info.name}": (number, info)
                 for number, info in enumerate(self.plugins)}
        impls = getattr(self._pluggy.hook, hook).get_hookimpls()
        for impl in sorted(impls, key=lambda impl: known[impl.plugin_name][0]):
            yield known[impl.plugin_name][1], impl

    def folders(self, hook: str) -> list[tuple[PluginInfo, Path]]:
        """Folders given by ``recipe_dirs`` or ``eval_dirs``. A hook that raises, or gives what is no list of
        folders, costs one warning and only what is wrong."""
        folders = []
        for info, impl in self._all_impls(hook):
            try:
                answer = impl.function()
                if not isinstance(answer, list | tuple):
                    raise PluginError(f"it returned {a_type(answer)}, not a list of folders")
                given = list(answer)
            except BaseException as error:
                if is_ctrl_c(error):
                    raise
                self._warn(f"{hook} of plugin {info.name!r} of {info.distribution} {info.version} failed: "
                           f"{described(error)}")
                continue
            for folder in given:
                if not isinstance(folder, str | os.PathLike) or not Path(folder).is_absolute():
                    problem = "is not an absolute path"
                elif not Path(folder).is_dir():
                    problem = "is not a folder" if Path(folder).exists() else "doesn't exist"
                else:
                    folders.append((info, Path(folder)))
                    continue
                self._warn(f"{hook} of plugin {info.name!r} of {info.distribution} {info.version}: "
                           f"{str(folder)!r} {problem}")
        return folders

    def dirs(self, hook: str) -> list[tuple[str, Path]]:
        """:meth:`folders`, each with its distribution's name."""
        return [(info.distribution, folder) for info, folder in self.folders(hook)]

    def notify(self, hook: str, **facts: Any) -> None:
        """Tell observers. An observer that raises costs one warning, never the run."""
        for info, impl in self._all_impls(hook):
            try:
                impl.function(*[facts[n] for n in impl.argnames])
            except BaseException as error:  # SystemExit too: what an observer does never ends the run
                if is_ctrl_c(error):
                    raise
                if (key := f"{impl.plugin_name} {hook}") not in self._told:
                    self._told.add(key)
                    warnings.warn(f"{info.distribution}:{info.name} failed in {hook}: {described(error)}",
                                  stacklevel=2)

    def observed(self, info: PluginInfo) -> list[str]:
        """The observers that a plugin implements."""
        return [hook for hook in OBSERVERS if any(owner is info for owner, _ in self._all_impls(hook))]

    def blame(self, error: BaseException) -> tuple[PluginInfo, str] | None:
        """The plugin whose code raised an error, and where: ``file:line in function``; ``None`` if no
        plugin's frame is on the way."""
        strangers = [(info, package) for info in self.plugins if info.distribution != BUILTIN
                     for package in self._packages(info)]
        for frame, line in frames(error) if strangers else ():
            for info, package in strangers:
                if belongs(frame, package, info.file if package == package_of(info.module) else None):
                    return info, f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
        return None

    def _packages(self, info: PluginInfo) -> set[str]:
        """The package of a plugin's hooks, and the modules of what it registered, where they are its own."""
        targets = [entry.target for table in self.registries.values()
                   for entry in table.entries(info.name, info.distribution)]
        modules = {target.partition(":")[0] for target in targets if isinstance(target, str)}
        packages = {package_of(info.module), *modules}
        return {name for name in packages if name and not anothers(name, info.distribution)}

    def without(self, info: PluginInfo) -> str:
        """What to write before a command so that it runs without a plugin."""
        others = {other.name for other in self.plugins if other.distribution != BUILTIN} - {info.name}
        return f"QUANTKIT_PLUGINS={','.join(sorted(others))}"

    def _warn(self, text: str) -> None:
        """Each text once."""
        if text not in self._told:
            self._told.add(text)
            warnings.warn(text, stacklevel=3)


def _module_of(plugin: object) -> str:
    name = getattr(plugin, "__name__", None)
    return name if isinstance(name, str) else type(plugin).__module__


def _reason(error: BaseException, distribution: str) -> str:
    """Why a plugin was left out, in one line."""
    module = error.name if isinstance(error, ImportError) else None
    missing = isinstance(module, str) and module.split(".")[0] == BUILTIN
    hint = f"; it may be for another quantkit: pip install --upgrade {distribution}"
    return described(error).replace("{distribution}", distribution) + (hint if missing else "")


@functools.cache
def current() -> PluginManager:
    """The process's manager, made on first use. ``QUANTKIT_PLUGINS=a,b`` loads only those plugins."""
    value = os.environ.get("QUANTKIT_PLUGINS")
    only = None if value is None else [n.strip() for n in value.split(",") if n.strip()]
    return PluginManager(only)


def registry(kind: str) -> Registry[Any]:
    """The current registry of ``methods``, ``formats``, ``kernels``, …"""
    return current().registries[kind]


def named_files(folders: Iterable[tuple[str, Path]], below: str = ".") -> list[tuple[str, Path]]:
    """The YAML files of folders, which are named by their stems, each with its owner. A stranger's file that
    has a built-in's name costs a warning and is left out; those of several strangers all stay.

    Args:
        folders: as :meth:`PluginManager.dirs` gives them.
        below: where in each folder.
    """
    files = [(owner, path) for owner, folder in folders for path in sorted((folder / below).glob("*.yaml"))]
    builtin = {path.stem for owner, path in files if owner == BUILTIN}
    for owner, path in files:
        if owner != BUILTIN and path.stem in builtin:
            warnings.warn(f"{path} of {owner} is left out: {path.stem!r} is a name of quantkit's own",
                          stacklevel=2)
    return [(owner, path) for owner, path in files if owner == BUILTIN or path.stem not in builtin]


def blame(error: BaseException) -> PluginInfo | None:
    """The plugin whose code raised an error; ``None`` if it came from nobody's but quantkit's own."""
    culprit = _culprit(error)
    return culprit[0] if culprit else None


def plugin_failure(error: BaseException) -> PluginError | None:
    """What to say of an error that a plugin's code raised, which isn't one of quantkit's own kinds; ``None``
    if no plugin did."""
    if isinstance(error, QuantkitError) or (culprit := _culprit(error)) is None:
        return None
    info, where = culprit
    return PluginError(
        f"plugin {info.name!r} of {info.distribution} {info.version} failed: {described(error)}", why=where,
        next=f"quantkit plugins check {info.name}, or leave it out: {current().without(info)} quantkit …")


def _culprit(error: BaseException) -> tuple[PluginInfo, str] | None:
    try:
        return current().blame(error)
    except Exception:  # plugins can't even be loaded
        return None
