"""Reads untrusted JSON: size, number of values and depth are limited, and only an object is accepted.

Every JSON file of a model's or checkpoint's folder is read here, and so are the headers of safetensors files.
What Python's own reader would let through and what fails later is refused too: a key that stands twice, NaN
and infinities, integers that no float can hold, and text that no file can hold (lone surrogates).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from quantkit.support.errors import QuantkitError, SourceError
from quantkit.support.paths import open_regular

MAX_NODES = 4_000_000
"""Values in one document. A header of 200,000 tensors has half of that."""
MAX_CONFIG = 16 * 2**20
"""Bytes of a ``config.json``; one that names the scheme of each of 100,000 layers has 10 MB."""
MAX_DEPTH = 32
"""Objects and lists inside each other; no file of a model has more than ten."""
MAX_DIGITS = 39
"""Of an integer: sums and products of a few such numbers are finite as floats. transformers writes 31 digits
for ``model_max_length`` where a tokenizer knows none."""
AGAIN = "download the file again"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_object(raw: bytes, where: str, *, error: type[QuantkitError] = SourceError,
                 next: str = AGAIN, infinities: bool = False) -> dict[str, Any]:
    """Parse a JSON object.

    Args:
        raw: UTF-8 text; the caller has capped its length.
        where: how messages name it: ``the header of model.safetensors``.
        error: the class of the errors that are raised.
        next: the remedy that they suggest.
        infinities: accept ``Infinity`` and ``-Infinity``, which the ``config.json`` of Mamba 2 and Nemotron-H
            have, as what transformers 5 writes instead: ``{"__float__": "Infinity"}``.

    Raises:
        QuantkitError: of the class ``error``: it is no object, no JSON, nested too deep, has a key twice, a
            number that is not finite or too long, a lone surrogate, or more than :data:`MAX_NODES` values.
            Time and memory are bounded by the length and that number.
    """

    def no_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise error(f"{where} has the key {key[:80]!r} twice",
                        why="readers disagree on which of the two counts",
                        next="don't use this file: no honest tool writes it")
        return result

    # every value but the first follows one of these, so a bomb is seen before anything is built
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > MAX_NODES:
        raise error(f"{where} holds too many values", why=f"{MAX_NODES:,} are allowed",
                    next="don't use this file: no honest tool writes it")
    try:
        text = raw.decode("utf-8-sig")  # editors on Windows write a mark at the beginning
        data = json.loads(text, object_pairs_hook=no_twice, parse_float=_finite, parse_int=_short,
                          parse_constant=_spelled if infinities else _no_constant)
        _check_depth(data)
        if holds_lone_surrogate(text, data):
            raise ValueError("it holds half of a surrogate pair")
    except (ValueError, RecursionError) as cause:
        raise error(f"{where} is not JSON", why=str(cause)[:200], next=next) from None
    if not isinstance(data, dict):
        raise error(f"{where} holds a {type(data).__name__}, not a JSON object", next=next)
    return data


def read_object(path: Path, limit: int, *, error: type[QuantkitError] = SourceError,
                next: str = AGAIN, infinities: bool = False) -> dict[str, Any]:
    """Read and parse a JSON file of at most ``limit`` bytes. Raises ``error``, as :func:`parse_object`."""
    try:
        with open_regular(path) as file:
            raw = file.read(limit + 1)
    except (OSError, ValueError) as cause:
        raise error(f"{path} can't be read", why=getattr(cause, "strerror", None) or str(cause),
                    next=next) from cause
    if len(raw) > limit:
        raise error(f"{path} is larger than {limit:,} bytes", why="no file of this kind needs "
                                                                  "to be", next=next)
    return parse_object(raw, str(path), error=error, next=next, infinities=infinities)


def holds_lone_surrogate(text: str, data: Any) -> bool:
    """Whether a document holds half of a surrogate pair, which JSON can write and UTF-8 can't.

    Args:
        text: the document as it was written.
        data: the values that it was parsed to.
    """
    if not _SURROGATE.search(text):
        return False
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _spelled(name: str) -> dict[str, str]:
    return _no_constant(name) if name == "NaN" else {"__float__": name}


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]} is not finite")
    return value


def _short(text: str) -> int:
    if len(text) > MAX_DIGITS and len(text.lstrip("-")) > MAX_DIGITS:
        raise ValueError(f"the number {text[:MAX_DIGITS]}… has more than {MAX_DIGITS} digits")
    return int(text)


def _check_depth(data: Any) -> None:
    """Raise ValueError if more than :data:`MAX_DEPTH` objects and lists lie inside each other."""
    containers = (dict, list)  # a vocabulary has a hundred thousand values to ask for
    if not isinstance(data, containers):
        return
    level = [data]
    for _ in range(MAX_DEPTH + 1):
        level = [part for node in level for part in (node.values() if isinstance(node, dict) else node)
                 if isinstance(part, containers)]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
