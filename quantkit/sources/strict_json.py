"""JSON from strangers: size capped, duplicate keys refused, an object or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quantkit.errors import SourceError


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raises SourceError naming ``where``."""

    def no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise SourceError(f"{where} has the key {key[:80]!r} twice",
                                  why="readers disagree on which of the two counts")
            found[key] = value
        return found

    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=no_twice)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is not JSON", why=str(error)[:200],
                          next="download the file again") from None
    if not isinstance(data, dict):
        raise SourceError(f"{where} holds a {type(data).__name__}, not a JSON object")
    return data


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """Read and parse a JSON file of at most ``limit`` bytes."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise SourceError(f"{path} can't be read", why=error.strerror or str(error)) from error
    if len(raw) > limit:
        raise SourceError(f"{path} is larger than {limit} bytes", why="no such file needs to be")
    return parse_object(raw, str(path))
