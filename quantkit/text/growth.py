"""Rejects a ``tokenizer.json`` that would turn a short text into gigabytes.

Normalizers and decoders replace, and one after another they multiply. What a post-processor puts around a
text is a list in the file, which may be named any number of times.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import tokenizers

from quantkit.support.errors import SourceError

MAX_FACTOR = 256
"""Characters that one character may become; with sentencepiece's normalization it is up to 36."""
MAX_AROUND = 1024
"""Ids that a post-processor may put around a text; real ones put up to four."""


def check_growth(inner: tokenizers.Tokenizer, name: str) -> None:
    """Look at the parts of a tokenizer that write text or ids.

    Raises:
        SourceError: together they make too much of a text; ``name`` is the file's.
    """
    for part in (inner.normalizer, inner.pre_tokenizer, inner.decoder):
        factor = 1
        for step in _steps(part):
            factor *= _factor(step)
            if factor > MAX_FACTOR:
                raise SourceError(f"{name} makes a text more than {MAX_FACTOR} times as long",
                                  why=f"{type(part).__name__}: its steps multiply",
                                  next="don't use this file: no honest tool writes it")
    if (around := sum(map(_around, _steps(inner.post_processor)))) > MAX_AROUND:
        raise SourceError(f"{name} puts {around} tokens around every text", why=f"{MAX_AROUND} are allowed",
                          next="don't use this file: no honest tool writes it")


def _steps(part: Any) -> Iterator[dict[str, Any]]:
    """What is done one after another; a step of a sequence may be a sequence."""
    waiting = [] if part is None else [json.loads(part.__getstate__())]
    while waiting:
        step = waiting.pop()
        yield step
        for kind in ("normalizers", "pretokenizers", "decoders", "processors"):
            waiting += step.get(kind, [])


def _factor(step: dict[str, Any]) -> int:
    """Characters that a step writes for one that it reads, at most."""
    match step["type"]:
        case "Replace":
            old, new = step["pattern"].get("String"), len(step["content"])
            # an expression may match nothing, between any two characters
            return max(1, -(-new // len(old)) if old else 1 + new)
        case "Prepend":
            return 1 + len(step["prepend"])
        case "ByteLevel":
            return 4  # one for each byte of a character
        case "Precompiled":  # sentencepiece's: a trie behind its length, then the texts, each up to a NUL
            raw = base64.b64decode(step["precompiled_charsmap"])
            texts = raw[4 + int.from_bytes(raw[:4], "little"):].split(b"\0")
            return max(1, *(len(text.decode("utf-8", "replace")) for text in texts))
    return 1


def _around(step: dict[str, Any]) -> int:
    """Ids of a template in the longer one of its two forms."""
    if step["type"] != "TemplateProcessing":
        return 2
    sizes = {name: len(entry["ids"]) for name, entry in step["special_tokens"].items()}
    forms = ([piece["SpecialToken"]["id"] for piece in step[form] if "SpecialToken" in piece]
             for form in ("single", "pair"))
    return max(sum(sizes.get(name, 0) for name in names) for names in forms)
