"""The type of options that take numbers of tokens: ``8192``, ``8k``, ``8K``."""

from __future__ import annotations

from typing import Any

import click

from quantkit.support.errors import UsageError
from quantkit.support.units import tokens_of

HOW = "k and m mean thousands and millions, K and M mean 1,024 and 1,048,576 (as in vLLM)"
LIMIT = 2**30
"""More tokens than any model reads; larger numbers are slips of the pen."""


class TokenCount(click.ParamType):
    """One number of tokens, an int.

    Args:
        least: the smallest that is allowed.
    """

    name = "tokens"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Raises UsageError: it is no number of tokens, or too small."""
        return value if isinstance(value, int) else self.parse(str(value), str(value), param)

    def parse(self, text: str, typed: str, param: click.Parameter | None) -> int:
        """``text``, which is ``typed`` or a part of it. Raises UsageError."""
        count = tokens_of(text)
        if count is not None and self.least <= count <= LIMIT:
            return count
        option = max(param.opts, key=len) if param else "a number of tokens"
        raise UsageError(f"{option} {typed[:80]} can't be read" if count is None else
                         f"{option} is {typed[:80]}", next=f"{option} 8192, 8k or 8K",
                         why=f"it must be whole numbers of tokens from {self.least} to {LIMIT:,}; {HOW}")


class TokenCounts(click.ParamType):
    """Numbers of tokens with commas between them, a tuple of int. Argument as for :class:`TokenCount`."""

    name = "list"

    def __init__(self, least: int = 1) -> None:
        self._count = TokenCount(least)

    def convert(self, value: Any, param: click.Parameter | None,
                ctx: click.Context | None) -> tuple[int, ...]:
        """Raises UsageError: one of them is no number of tokens, or too small."""
        if isinstance(value, tuple):
            return value
        return tuple(self._count.parse(part, str(value), param) for part in str(value).split(","))
