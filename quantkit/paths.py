"""Checks paths that a user typed."""

from __future__ import annotations

from pathlib import Path

from quantkit.errors import UsageError


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
