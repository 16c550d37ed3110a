"""Finds the plugin whose code raised an error."""

from __future__ import annotations

import functools
import importlib.metadata
import sys
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType

from quantkit.plugins.manager import PluginInfo, current
from quantkit.plugins.registry import BUILTIN, described
from quantkit.support.errors import PluginError, QuantkitError


def blame(error: BaseException) -> tuple[PluginInfo, str] | None:
    """The plugin whose code raised an error, and where: ``file:line in function``; ``None`` if no plugin's
    frame is on the way."""
    try:
        packages = [(info, package) for info in current().plugins if info.distribution != BUILTIN
                    for package in _packages(info)]
    except Exception:  # plugins can't even be loaded
        return None
    for frame, line in _frames(error) if packages else ():
        module = f"{frame.f_globals.get('__name__', '')}."
        for info, package in packages:
            if module.startswith(f"{package}."):
                return info, f"{frame.f_code.co_filename}:{line} in {frame.f_code.co_name}"
    return None


def plugin_failure(error: BaseException) -> PluginError | None:
    """What to say of an error that a plugin's code raised, which isn't one of quantkit's own kinds; ``None``
    if no plugin did."""
    if isinstance(error, QuantkitError) or (culprit := blame(error)) is None:
        return None
    info, where = culprit
    others = sorted({other.name for other in current().plugins if other.distribution != BUILTIN}
                    - {info.name})
    return PluginError(f"{info} failed: {described(error)}", why=where,
                       next=f"quantkit plugins check {info.name}, or leave it out: "
                            f"QUANTKIT_PLUGINS={','.join(others)} quantkit …")


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Every frame that an error came through and its line there: the innermost first, then those of what
    caused the error, of what was handled when it was raised, and of the errors in its group."""
    waiting, seen = [error], list[BaseException]()
    while waiting:
        current_error = waiting.pop(0)
        if any(current_error is other for other in seen):
            continue
        seen.append(current_error)
        yield from reversed(list(traceback.walk_tb(current_error.__traceback__)))
        inner = current_error.exceptions if isinstance(current_error, BaseExceptionGroup) else ()
        following = (current_error.__cause__, current_error.__context__, *inner)
        waiting += [other for other in following if other is not None]


def _packages(info: PluginInfo) -> set[str]:
    """The package of a plugin's hooks, and the modules of what it registered, where they are its own: torch
    isn't a plugin's code because the plugin registers a function of torch."""
    targets = [entry.target for table in current().registries.values()
               for entry in table.entries(info.name, info.distribution)]
    modules = {target.partition(":")[0] for target in targets if isinstance(target, str)}
    foreign = {"quantkit", "quantkit_kernels", *sys.stdlib_module_names}
    return {name for name in {_package_of(info.module), *modules} if (root := name.partition(".")[0])
            not in foreign and info.distribution in _owners().get(root, [info.distribution])}


@functools.cache
def _owners() -> Mapping[str, list[str]]:
    """Name that can be imported → the distributions that install it; reading them takes a second."""
    return importlib.metadata.packages_distributions()


def _package_of(module: str) -> str:
    """The first part of a module's name that is a package or module of its own, and not a namespace that
    several distributions share: ``quantkit_hqq`` of ``quantkit_hqq.method``."""
    parts = module.split(".")
    prefixes = [".".join(parts[:size]) for size in range(1, len(parts))]
    return next((name for name in prefixes if getattr(sys.modules.get(name), "__file__", None)), module)
