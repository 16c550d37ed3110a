"""What a plugin must be before anything of it is used: for this version of the hooks, with hooks that exist
and can be called; and what its hooks register."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable
from types import MappingProxyType, ModuleType
from typing import Any

import pluggy

from quantkit.plugins import hooks
from quantkit.plugins.hooks import API_VERSION, OLDEST_API_VERSION
from quantkit.plugins.registry import Registry, RegistryEntry, a_type, described, is_ctrl_c
from quantkit.support.errors import PluginError, did_you_mean

HOOKS = tuple(name for name, function in inspect.getmembers(hooks, inspect.isfunction)
              if hasattr(function, "quantkit_spec"))
"""Every hook's name."""
Registrations = list[tuple[str, RegistryEntry]]
"""Kind, as in the hook's name, and the entry, in the order of registration."""


def api_of(plugin: object, module: str = "") -> int:
    """The version of the hooks that a plugin was written for.

    Args:
        plugin: which says so, or
        module: the name of its module, where that does.

    Raises:
        PluginError: it is none that this quantkit offers; the message goes on after the plugin's name.
    """
    version = getattr(plugin, "QUANTKIT_API", getattr(sys.modules.get(module), "QUANTKIT_API", 1))
    if type(version) is not int or version < 1:
        raise PluginError(f"says QUANTKIT_API = {version!r}"[:200],
                          why="it is a whole number: the version of the hooks that the plugin is written for",
                          next=f"write QUANTKIT_API = {API_VERSION}")
    if not OLDEST_API_VERSION <= version <= API_VERSION:
        older = "" if API_VERSION == OLDEST_API_VERSION else f"{OLDEST_API_VERSION} to "
        update = ("pip install --upgrade {distribution}" if version < OLDEST_API_VERSION
                  else "run pip install . in a newer checkout of quantkit")
        raise PluginError(f"is for version {version} of the plugin API", next=update,
                          why=f"this quantkit offers {older}{API_VERSION}")
    return version


def check_marks(plugin: object) -> None:
    """Look at what is marked with ``@hookimpl``.

    Raises:
        PluginError: nothing is, or something that is no function or no hook; the message goes on after the
            plugin's name.
    """
    if inspect.isclass(plugin):
        raise PluginError(f"is the class {plugin.__name__}",
                          why="a plugin is a module, or an object with hooks",
                          next="let the entry point name the module")
    marked = {}
    for attr in dir(plugin):
        options = getattr(getattr(plugin, attr, None), "quantkit_impl", None)
        if isinstance(options, dict):
            marked[attr] = options
    if not marked:
        unmarked = [name for name in HOOKS if callable(getattr(plugin, name, None))]
        kind = "" if isinstance(plugin, ModuleType) else f" and is {a_type(plugin)}"
        raise PluginError(f"marks no function with @hookimpl{kind}", next="see docs/plugins.md",
                          why=f"{', '.join(unmarked)} must be marked to be called" if unmarked
                          else "hooks are functions marked with @hookimpl of quantkit.plugins.hooks")
    for attr, options in marked.items():
        hook, function = options.get("specname") or attr, getattr(plugin, attr)
        if not inspect.isroutine(function):
            raise PluginError(f"marks {attr!r} with @hookimpl, which isn't a function",
                              why=f"it is {a_type(function)}")
        if hook not in HOOKS and not options.get("optionalhook"):
            raise PluginError(f"implements a hook {hook!r} that doesn't exist in quantkit",
                              why=did_you_mean(hook, HOOKS))
        if options.get("wrapper") or options.get("hookwrapper"):
            raise PluginError(f"implements {hook!r} as a wrapper", why="hooks of quantkit aren't wrapped")
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function) \
                or inspect.isasyncgenfunction(function):
            raise PluginError(f"implements {hook!r} as a coroutine or generator",
                              why="a hook is an ordinary function")


def collect(impls: Callable[[str], Iterable[pluggy.HookImpl]], tables: dict[str, Registry[Any]],
            make: Callable[..., RegistryEntry]) -> Registrations:
    """Call a plugin's ``register`` hooks; nothing is added to a table yet.

    Args:
        impls: the plugin's implementations of a hook.
        tables: by kind.
        make: name, target and ``about=`` → an entry of this plugin.

    Raises:
        PluginError: a hook raises, registers wrongly, or one name twice; the message goes on after the
            plugin's name.
    """
    entries: Registrations = []
    done = False

    def register(kind: str, name: str, target: object, **about: Any) -> None:
        if done:
            raise PluginError(f"{tables[kind].kind} {name!r} is registered too late",
                              why="register() may be called until its hook returns")
        entry = make(name, target, about=MappingProxyType(about))
        tables[kind].check(entry)
        if any(name == other.name and tables[kind].shares_names(tables[before]) for before, other in entries):
            raise PluginError(f"registers the {tables[kind].kind} {name!r} twice",
                              why="a name means one thing")
        entries.append((kind, entry))

    register.__qualname__ = "register"  # as its author knows it
    for kind in tables:
        hook = f"register_{kind}"
        for impl in impls(hook):
            try:
                impl.function(*[functools.partial(register, kind) for _ in impl.argnames])
            except PluginError:
                raise
            except BaseException as error:  # also SystemExit: it costs only itself
                if is_ctrl_c(error):
                    raise
                raise PluginError(f"fails in its hook {hook}", why=described(error)) from error
    done = True
    return entries
