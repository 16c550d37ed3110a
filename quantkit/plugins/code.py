"""Whose file a frame of a traceback, a module or a target is. Imports nothing to tell."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType


def frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Every frame that an error came through and its line there: the innermost first, then those of what
    caused the error, of what was handled when it was raised, and of the errors in its group."""
    waiting, seen = [error], set[int]()
    while waiting:
        current = waiting.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        steps, step = [], current.__traceback__
        while step is not None:
            steps.append((step.tb_frame, step.tb_lineno))
            step = step.tb_next
        yield from reversed(steps)
        inner = current.exceptions if isinstance(current, BaseExceptionGroup) else ()
        waiting += [other for other in (current.__cause__, current.__context__, *inner) if other is not None]


def package_of(module: str) -> str:
    """The first part of a module's name that is a package or module of its own, and not a namespace that
    several distributions share: ``quantkit_hqq`` of ``quantkit_hqq.method``."""
    parts = module.split(".")
    for size in range(1, len(parts)):
        name = ".".join(parts[:size])
        if name in sys.modules and getattr(sys.modules[name], "__file__", None):
            return name
    return module


def belongs(frame: FrameType, package: str, file: str | None) -> bool:
    """Whether a frame runs code of a package: by its module's name, or by where its file is."""
    name = str(frame.f_globals.get("__name__", ""))
    if name == package or name.startswith(package + "."):
        return True
    if file is None:
        return False
    code, home = Path(frame.f_code.co_filename), Path(file)
    return code.is_relative_to(home.parent) if home.name == "__init__.py" else code == home


def anothers(module: str, distribution: str) -> bool:
    """Whether a module is of Python, of quantkit or of another installed distribution than a plugin's: torch
    isn't a plugin's code because the plugin registers a function of torch."""
    root = module.split(".")[0]
    if root in sys.stdlib_module_names or root in ("quantkit", "quantkit_kernels"):
        return True
    owners = _installed().get(root, ())  # none has what is imported from a source tree
    return bool(owners) and distribution not in owners


@functools.cache
def _installed() -> dict[str, set[str]]:
    """Name that can be imported → the distributions that install it. One whose metadata can't be read is
    passed over."""
    owners: dict[str, set[str]] = {}
    for installed in importlib.metadata.distributions():
        try:
            names = set((installed.read_text("top_level.txt") or "").split())
            if not names:  # installed.files would look for each on the disk
                files = [line.split(",")[0] for line in (installed.read_text("RECORD") or "").splitlines()]
                names = {file.split("/")[0].removesuffix(".py") for file in files if file.endswith(".py")}
            for name in names:
                owners.setdefault(name, set()).add(installed.name)
        except Exception:  # malformed metadata is its distribution's matter
            continue
    return owners


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
