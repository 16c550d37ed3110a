"""Log-probabilities as the two APIs write them."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from quantkit.runtime.sequence import TokenInfo
from quantkit.runtime.tokenizer import Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON doesn't have; as OpenAI does it."""
_BROKEN = "\ufffd"


class TokenTexts:
    """What single tokens look like, special ones written out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # behind another token, because some decoders drop a text's leading space
        self._before = tokenizer.encode("a", special=False)[-1:]
        self._prefix = len(tokenizer.decode(self._before, skip_special=False))
        self.text = functools.lru_cache(maxsize=2**16)(self._text)

    def _text(self, token: int) -> str:
        return self._tokenizer.decode([*self._before, token], skip_special=False)[self._prefix:]

    def bytes(self, token: int) -> list[int] | None:
        """UTF-8 of a token's text; ``None`` if it is a part of a character, and so has no text."""
        text = self.text(token)
        return None if _BROKEN in text else list(text.encode())


def chat_logprobs(tokens: Iterable[TokenInfo], texts: TokenTexts) -> dict[str, Any]:
    """``{"content": [{token, logprob, bytes, top_logprobs}]}``."""

    def one(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": texts.bytes(token)}

    return {"content": [one(info.id, info.logprob) | {
        "top_logprobs": [one(token, logprob) for token, logprob in info.top]} for info in tokens],
        "refusal": None}


def text_logprobs(tokens: Iterable[TokenInfo], texts: TokenTexts, offset: int = 0) -> dict[str, Any]:
    """``{tokens, token_logprobs, top_logprobs, text_offset}``, an entry a token.

    Args:
        tokens: in order; the first of a prompt has no log-probability: ``None`` twice.
        texts: of the model.
        offset: characters before the first.
    """
    out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for info in tokens:
        text = texts.text(info.id)
        out["tokens"].append(text)
        out["token_logprobs"].append(None if info.logprob is None else _finite(info.logprob))
        out["top_logprobs"].append(None if info.logprob is None else _by_text(info, texts))
        out["text_offset"].append(offset)
        offset += len(text)
    return out


def _by_text(info: TokenInfo, texts: TokenTexts) -> dict[str, float]:
    """Alternatives by their text, the chosen token among them; of tokens that look alike the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in (*info.top, (info.id, info.logprob)):
        found.setdefault(texts.text(token), _finite(logprob))
    return found


def _finite(logprob: float | None) -> float:
    return LEAST if logprob is None else max(logprob, LEAST)
