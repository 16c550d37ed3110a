"""Gives memory that was freed back to the system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


def trim_heap() -> None:
    """Return what the C library keeps of freed memory; where it can't be asked, nothing happens."""
    if (function := _function()) is not None:
        function(0)


@functools.cache
def _function() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim  # glibc's
    except (OSError, AttributeError, TypeError):
        return None
    trim.argtypes, trim.restype = [ctypes.c_size_t], ctypes.c_int
    function: Callable[[int], int] = trim
    return function
