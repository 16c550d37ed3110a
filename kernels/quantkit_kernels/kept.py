"""Where what took long to make is kept on a user's machine."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path


def cache_folder() -> Path | None:
    """Where machine code is kept: ``QUANTKIT_CACHE``, else the user's cache folder; ``None`` without one."""
    if named := os.environ.get("QUANTKIT_CACHE"):
        return Path(named) / "cpu"
    try:
        if sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return None
    return base / "quantkit" / "cpu"


def is_ours(about: os.stat_result) -> bool:
    """Whether a file that was kept counts: this user or root owns it, and nobody else may write to it."""
    return not hasattr(os, "getuid") or (about.st_uid in (os.getuid(), 0) and not about.st_mode & 0o022)


def is_writable(folder: Path | None) -> bool:
    """Whether something can be kept there; the folder is made if it isn't there."""
    if folder is None:
        return False
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
