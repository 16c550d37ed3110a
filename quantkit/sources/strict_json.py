"""JSON from strangers: size and nodes capped, duplicate keys and NaN refused, an object or nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NoReturn

from quantkit.errors import SourceError

MAX_NODES = 4_000_000
"""Values in one document. A header of 200,000 tensors has half of that."""

_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def holds_half_character(text: str, data: Any) -> bool:
    """Whether a document holds half of a surrogate pair, which JSON can write and UTF-8 can't.

    Args:
        text: its text.
        data: what it was parsed to.
    """
    if not _HALF.search(text):
        return False
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        raw: UTF-8 text; the caller has capped its length.
        where: what it is, for errors: ``the header of model.safetensors``.

    Raises:
        SourceError: not an object, not JSON, nested too deep, a key twice, NaN or an infinity, half of a
            surrogate pair, or more than :data:`MAX_NODES` values. Time and memory
            are bounded by the length and that number.
    """

    def no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            key = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise SourceError(f"{where} has the key {key[:80]!r} twice",
                              why="readers disagree on which of the two counts",
                              next="don't use this file: no honest tool writes it")
        return found

    def no_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not JSON")

    # every value but the first follows one of these, so a bomb is seen before anything is built
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_NODES:
        raise SourceError(f"{where} holds too many values", why=f"{MAX_NODES:,} are allowed",
                          next="don't use this file: no honest tool writes it")
    try:
        text = raw.decode("utf-8")
        data = json.loads(text, object_pairs_hook=no_twice, parse_constant=no_constant)
        if holds_half_character(text, data):
            raise ValueError("it holds half of a surrogate pair")
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where} is not JSON", why=str(error)[:200],
                          next="download the file again") from None
    if not isinstance(data, dict):
        raise SourceError(f"{where} holds a {type(data).__name__}, not a JSON object",
                          next="download the file again")
    return data


def read_object(path: Path, limit: int) -> dict[str, Any]:
    """Read and parse a JSON file of at most ``limit`` bytes. Raises SourceError, as :func:`parse_object`."""
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 1)
    except OSError as error:
        raise SourceError(f"{path} can't be read", why=error.strerror or str(error)) from error
    if len(raw) > limit:
        raise SourceError(f"{path} is larger than {limit:,} bytes", why="no such file needs to be")
    return parse_object(raw, str(path))
