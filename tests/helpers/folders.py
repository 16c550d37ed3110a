"""What a folder holds."""

from __future__ import annotations

from pathlib import Path


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file by its name."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
