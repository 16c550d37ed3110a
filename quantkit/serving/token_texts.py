"""What single tokens look like."""

from __future__ import annotations

import functools

from quantkit.text.tokenizer import Tokenizer

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
