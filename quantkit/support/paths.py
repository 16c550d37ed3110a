"""Checks paths that a user typed, opens files that may be anything, and finds the data that ships here."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from quantkit.support.errors import QuantkitError, UsageError

FileState = tuple[int, int, int]
"""Size, time of the last change, inode."""


def file_state(stat: os.stat_result) -> FileState:
    """By which a file can be told from what is at its place later."""
    return stat.st_size, stat.st_mtime_ns, stat.st_ino


def typed_path(text: str | Path) -> Path:
    """The path that ``text`` names, ``~`` expanded; something may be there or not.

    Raises:
        UsageError: there can't be one: it is empty, of a user who isn't there, or longer than a file
            system takes; or it may not be looked at.
    """
    shown = str(text)[:200]
    if not str(text):
        raise UsageError("a path is empty", next="name a file or a folder")  # pathlib: the current folder
    try:
        path = Path(text).expanduser()
        path.exists()  # raises when a part is too long
    except (OSError, RuntimeError, ValueError) as error:
        problem = "can't be reached" if isinstance(error, OSError) else "can't be a path"
        raise UsageError(f"{shown!r} {problem}", why=getattr(error, "strerror", None) or str(error),
                         next="correct it, or name another") from None
    return path


def local_path(text: str) -> Path | None:
    """The same, and ``None`` if there can't be one."""
    try:
        return typed_path(text)
    except UsageError:
        return None


@contextlib.contextmanager
def reading(path: Path, error: type[QuantkitError]) -> Iterator[None]:
    """Turn an OSError of the block into an ``error`` that says that ``path`` can't be read."""
    try:
        yield
    except OSError as cause:
        raise error(f"{path} can't be read", why=cause.strerror or str(cause)) from cause


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file to read it. Raises OSError too if it is no regular file, or a link to none: a device may
    never end, and whoever opens a pipe may wait for ever."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return os.fdopen(handle, "rb")


def read_regular(path: Path, limit: int) -> bytes:
    """All of a regular file of at most ``limit`` bytes. Raises OSError."""
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit:,} bytes", str(path))
    return data


def data_dir(kind: Literal["recipes", "evals"]) -> Path:
    """The folder of shipped recipes or evaluation suites: in a wheel under ``quantkit/_data``, else beside
    the checkout. It may not exist in an odd install."""
    package = Path(__file__).resolve().parents[1]
    packaged = package / "_data" / kind
    return packaged if packaged.is_dir() else package.parent / kind
