"""Log-probabilities as the two APIs write them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from quantkit.runtime.core import TokenInfo
from quantkit.serving.models import TokenTexts
from quantkit.text.tokenizer import StreamDecoder, Tokenizer

LEAST = -9999.0
"""Stands for minus infinity, which JSON doesn't have; as OpenAI does it."""


def chat_logprobs(tokens: Iterable[TokenInfo], texts: TokenTexts) -> dict[str, Any]:
    """``{"content": [{token, logprob, bytes, top_logprobs}]}``."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": _finite(logprob), "bytes": texts.bytes(token)}

    return {"content": [entry(info.id, info.logprob) | {
        "top_logprobs": [entry(token, logprob) for token, logprob in info.top]} for info in tokens],
        "refusal": None}


class TextOffsets:
    """Where each token begins in one choice's text; a part of a character begins where the character does.

    Args:
        tokenizer: The model's tokenizer.
        prompt: The ids of the prompt, if it is a part of the text.
        text: The prompt as it stands there: without what the tokenizer put in front of it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), text: str = "") -> None:
        decoded = tokenizer.decode(prompt, skip_special=False)
        self._left, self._after = len(prompt), len(text)
        self._at = len(text) - len(decoded) if decoded.endswith(text) else 0
        self._prompt = StreamDecoder(functools.partial(tokenizer.decode, skip_special=False))
        self._answer = tokenizer.stream()

    def push(self, token: int) -> int:
        """Characters before the next token, of the prompt first and then of the answer."""
        at = max(self._at, 0)
        if self._left:
            self._left -= 1
            self._at = self._at + len(self._prompt.push(token)) if self._left else self._after
        else:
            self._at += len(self._answer.push(token))
        return at


def text_logprobs(tokens: Iterable[TokenInfo], texts: TokenTexts, offsets: TextOffsets) -> dict[str, Any]:
    """``{tokens, token_logprobs, top_logprobs, text_offset}``, an entry a token.

    Args:
        tokens: The tokens in order; the first of a prompt has no log-probability: ``None`` twice.
        texts: The texts of the model's tokens.
        offsets: The offsets of the choice that they belong to, which are moved behind the last.
    """
    out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for info in tokens:
        out["tokens"].append(texts.text(info.id))
        out["token_logprobs"].append(None if info.logprob is None else _finite(info.logprob))
        out["top_logprobs"].append(None if info.logprob is None else _by_text(info, texts))
        out["text_offset"].append(offsets.push(info.id))
    return out


def _by_text(info: TokenInfo, texts: TokenTexts) -> dict[str, float]:
    """Alternatives by their text, the chosen token among them; of tokens that look alike the likeliest."""
    top: dict[str, float] = {}
    for token, logprob in (*info.top, (info.id, info.logprob)):
        top.setdefault(texts.text(token), _finite(logprob))
    return top


def _finite(logprob: float | None) -> float:
    return LEAST if logprob is None else max(logprob, LEAST)
