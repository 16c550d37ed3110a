"""Imports what is large without the garbage collector, which would look through it again and again."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Importing and loading make a million objects that stay: looking for those that don't takes a tenth of
    the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def import_large(*modules: str) -> None:
    """Import modules by their full names, torch's for instance."""
    with collector_paused():
        for name in modules:
            importlib.import_module(name)
