"""Bounds a text's tokens from below by the longest token, so that far too long texts aren't encoded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

UNICODE_FORMS = 6
"""Times that NFC, NFD, NFKC and NFKD shorten a text at most, in bytes of UTF-8: three characters of four
bytes become one of two."""
_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_KEEPING = frozenset({"Sequence", "ByteLevel", "Digits", "Metaspace", "Prepend", *_FORMS})
"""Normalizers and pre-tokenizers that drop nothing of a text."""


@dataclass(frozen=True)
class TokenLength:
    """How much of a text a token can stand for.

    Attributes:
        longest: bytes of UTF-8; no token stands for more.
        dropped: bytes that the vocabulary lacks, and that no token stands for.
    """

    longest: int
    dropped: bytes = b""

    def least(self, text: str) -> int:
        """How few tokens ``text`` can have."""
        data = text.encode("utf-8", "surrogatepass").translate(None, self.dropped)
        return -(-len(data) // self.longest)


def token_length(content: Mapping[str, Any]) -> TokenLength | None:
    """The same for a tokenizer.

    Args:
        content: the content of ``tokenizer.json``.

    Returns:
        ``None`` if there is no such length: if a part of the tokenizer can drop text (strip spaces, replace
        by something shorter, let a token swallow the spaces beside it) or can make one token of a text of any
        length (an unknown word).
    """
    model = content.get("model") or {}
    vocab, added = model.get("vocab"), content.get("added_tokens") or []
    if model.get("type", "BPE") != "BPE" or not isinstance(vocab, dict) or not vocab:
        return None
    parts = [*_parts(content.get("normalizer")), *_parts(content.get("pre_tokenizer"))]
    swallows = any(token.get("lstrip") or token.get("rstrip") for token in added)
    if swallows or not all(map(_keeps, parts)):
        return None
    kinds = {part.get("type") for part in parts}
    shortens = UNICODE_FORMS if kinds & _FORMS else 1
    if "ByteLevel" in kinds:  # there a letter stands for a byte
        longest = max(map(len, vocab))
        dropped = bytes(byte for byte, letter in enumerate(_letters()) if letter not in vocab)
    elif model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(256)):
        longest, dropped = max(map(_bytes, vocab)), b""
    else:
        return None
    # what another form of a character would be, is not looked at
    if shortens > 1 and dropped:
        return None
    return TokenLength(shortens * max([longest, *(_bytes(token["content"]) for token in added)]), dropped)


def _letters() -> list[str]:
    """The letter of each byte in a byte-level vocabulary: itself if printable, else the next from 256 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(others)) for byte in range(256)]


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _parts(node: Any) -> Iterable[dict[str, Any]]:
    """A normalizer or pre-tokenizer and all that it consists of."""
    if isinstance(node, dict):
        yield node
        for inside in (*(node.get("normalizers") or ()), *(node.get("pretokenizers") or ())):
            yield from _parts(inside)


def _keeps(part: Mapping[str, Any]) -> bool:
    kind = part.get("type")
    if kind == "Replace":  # of a text, by one that isn't shorter
        pattern = (part.get("pattern") or {}).get("String")
        return pattern is not None and _bytes(part.get("content", "")) >= _bytes(pattern)
    if kind in ("Split", "Punctuation"):
        return part.get("behavior") != "Removed"
    return kind in _KEEPING
