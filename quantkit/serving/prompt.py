"""Texts → token ids, without much work for a text that is far too long."""

from __future__ import annotations

from quantkit.runtime.core import ContextLengthError
from quantkit.serving.errors import ApiError
from quantkit.text.tokenizer import Tokenizer

HEAD_CHARACTERS = 2**16
"""Texts up to so long are encoded without looking at their beginning first."""


class PromptReader:
    """Encodes one request's prompts.

    Args:
        tokenizer: of the model.
        context: tokens of prompt and answer together.
        answer: of them for the answer, at least.
        param: the parameter that the texts come from.
    """

    def __init__(self, tokenizer: Tokenizer, context: int, answer: int, param: str) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._answer = answer
        self._param = param

    def encode(self, text: str) -> list[int]:
        """Ids of a plain prompt.

        Raises:
            ApiError, ContextLengthError: it doesn't fit.
        """
        self.check(text)
        ids = self._tokenizer.encode(text)
        if len(ids) + self._answer > self._context:
            raise ContextLengthError(len(ids), self._answer, self._context)
        return ids

    def check(self, text: str) -> None:
        """Refuse a text that is far too long: by its length, or by what the beginning of it has in tokens.

        How long a token can be bounds how few tokens there are, where nothing of a text is dropped
        (:func:`quantkit.text.length.token_length`). Otherwise, and for a text of short tokens, growing
        beginnings are encoded: where a text is cut changes the tokens next to the cut alone, so twice the
        context is far too much. That is less work than encoding it all, up to a text that fits.

        Raises:
            ApiError: it can't fit; the message has both numbers.
        """
        least = self._tokenizer.least_tokens(text)
        if least >= self._context:  # and at least one token is to follow
            raise self._too_long(f"at least {least} (it has {len(text.encode())} bytes)")
        size = max(8 * self._context, HEAD_CHARACTERS)
        while size < len(text):
            count = len(self._tokenizer.encode(text[:size], special=False))
            if count > 2 * self._context:
                raise self._too_long(f"more than {self._context} (its first {size} characters have {count})")
            size *= 2

    def _too_long(self, tokens: str) -> ApiError:
        # clients know this error by these words
        return ApiError(400, f"This model's maximum context length is {self._context} tokens; the prompt has "
                             f"{tokens}", param=self._param, code="context_length_exceeded")
